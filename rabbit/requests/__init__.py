"""The requests of the management client, by what they are about. Begin with ``sending.py``."""
