"""Archives of deleted queues' messages: written, read, replayed. Begin with ``writing.py``."""
