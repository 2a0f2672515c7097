"""An installation in a file: ``manage.py apply`` and ``manage.py export``.

``reading.py`` reads the file, ``present.py`` the database, ``planning.py`` compares them, and ``applying.py`` carries
out the changes by the functions that pages use. Begin with ``resources.py``.
"""
