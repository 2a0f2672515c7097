"""Queues over HTTP. Begin with ``queues.py`` (limits) and ``principals.py`` (permissions)."""
