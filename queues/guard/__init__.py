"""One pass of the monitor, and what it does to queues. Begin with ``monitor.py``."""
