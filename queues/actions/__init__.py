"""What people do to queues: delete, purge, set limits, release. Begin with ``single.py``."""
