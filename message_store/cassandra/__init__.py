"""The message store in Apache Cassandra. Begin with ``store.py``.

``StoreUnavailable`` says that no node answers, ``NoQueue`` that the queue was removed.
"""
