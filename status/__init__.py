"""Whether the broker and Guardian are healthy. Begin with ``rules.py``; operators' actions are in ``views.py``."""
