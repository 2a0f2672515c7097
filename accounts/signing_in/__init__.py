"""How owners sign in, and their sessions. Begin with ``codes.py``."""
