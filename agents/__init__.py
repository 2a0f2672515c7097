"""Queues that agents register, and the events they get. Begin with ``access.py``, ``registration`` and ``removal``."""
