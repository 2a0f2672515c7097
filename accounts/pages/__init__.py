"""The pages of owners, Pulse users and tokens. Begin with ``pulse_users.py``."""
