"""The guarded queues. Begin with ``rules`` (when a queue is deleted) and ``guard`` (one pass)."""
