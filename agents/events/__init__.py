"""Events: who gets them, and whether they arrive. Begin with ``publishing.py``."""
