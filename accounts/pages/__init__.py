"""The pages of owners, Pulse users and tokens. Begin with ``views.py``."""
