"""Messages of live queues are moved, copied, or sent back to where they died.

Begin with ``moving.py``. ``sending_back.py`` looks at dead letters; ``rules/dead_letters.py`` decides about them.
"""
