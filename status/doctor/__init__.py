"""``manage.py doctor``: what is wrong with an installation. Begin with ``examine.py``."""
