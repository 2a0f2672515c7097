"""The REST API that agents use. Begin with ``views.py``."""
