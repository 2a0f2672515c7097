"""Pure rules about queues: what to delete, to warn about, to block. Begin with ``thresholds.py``."""
