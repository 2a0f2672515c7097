"""All that speaks to RabbitMQ, without Django. Begin with ``management.py``, ``amqp.py`` and ``errors.py``."""
