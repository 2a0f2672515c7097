"""What all apps share. Each module has one subject; ``broker.py`` has the connections to RabbitMQ."""
