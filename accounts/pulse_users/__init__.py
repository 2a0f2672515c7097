"""What happens to Pulse users: created, owned, removed. Begin with ``creation.py``."""
