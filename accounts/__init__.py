"""Owners, their tokens and Pulse users. Begin with ``models.py``, ``access`` and ``pulse_users``."""
