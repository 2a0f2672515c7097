"""How owners sign in, and their sessions. Begin with ``signin.py``."""
