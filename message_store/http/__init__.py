"""The HTTP API of the message store. Begin with ``views.py``."""
