"""The pages about agents. Begin with ``views.py``."""
