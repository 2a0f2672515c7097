"""All that speaks to RabbitMQ, without Django. Begin with ``management.py``, ``amqp.py`` and ``errors.py``.

Every request may raise a ``BrokerError``. A client raises ValueError if its address is invalid.
"""
