"""Queues over HTTP. Begin with ``queues.py`` (limits) and ``principals.py`` (permissions).

Everything that uses the store may raise ``StoreUnavailable``; what changes a queue, ``NoQueue`` if it was deleted.
``Invalid`` has the error text of each invalid field, and ``QuotaReached`` says that the application would have more
than it may.
"""
