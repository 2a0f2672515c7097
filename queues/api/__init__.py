"""The REST API of queues, archives and exchanges. Begin with ``queues.py``."""
