"""The message store in Apache Cassandra. Begin with ``store.py``."""
