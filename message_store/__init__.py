"""Queues over HTTP. Begin with ``queues.py`` (limits) and ``principals.py`` (permissions).

Everything that uses the store may raise ``StoreUnavailable``; what changes a queue, ``NoQueue`` if it was deleted.
What checks values that clients give raises ``Invalid``, with the error text of each invalid field. ``QuotaReached``
says that the application would have more than it may.
"""
