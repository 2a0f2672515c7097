"""Sweeps compare agents' queues and logins on the broker with the rows. Begin with ``sweep.py``."""
