"""Who may use the broker, and what a token may do. Begin with ``vouching.py`` and ``scopes.py``."""
