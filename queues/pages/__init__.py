"""The pages of queues, archives and exchanges, one module for each subject. Begin with ``queue.py``."""
