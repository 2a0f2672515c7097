"""What a registration creates: rows, queues, logins. Begin with ``queues.py``."""
