"""What happens to Pulse users: created, owned, removed. Begin with ``pulse_users.py``."""
