"""The message store in Django's database. Begin with ``store.py``."""
