"""What all apps share. Each module has one subject; ``broker.py`` has the connections to RabbitMQ.

Clients of the broker raise ``BrokerUnavailable`` if none is configured or its URL is invalid.
"""
