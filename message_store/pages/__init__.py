"""The message store's pages. Begin with ``views.py``."""
