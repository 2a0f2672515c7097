"""Archives of deleted queues' messages: written, read, replayed, restored. Begin with ``writing.py``."""
