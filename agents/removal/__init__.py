"""What is removed from the broker with rows of agents. Begin with ``deletions.py``."""
