"""The REST API of owners, Pulse users and tokens. Begin with ``views.py``."""
