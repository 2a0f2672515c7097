"""What agents report about themselves, and what is unused. Begin with ``services.py``."""
