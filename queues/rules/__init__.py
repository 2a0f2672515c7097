"""Pure rules about queues: what to delete, to warn about, to block.

``comparison.py`` decides when a queue is deleted, ``thresholds.py`` at which length, and ``brake.py`` how many at once.
"""
