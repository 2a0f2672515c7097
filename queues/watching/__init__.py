"""Watch messages as they arrive, as copies in a temporary queue: ``starting.py`` decides who may, and what."""
