"""What notifications about queues and the broker say. Begin with ``about_queues.py``."""
