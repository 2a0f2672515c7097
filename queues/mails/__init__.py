"""What notifications about queues and the broker say. Begin with ``texts.py``."""
