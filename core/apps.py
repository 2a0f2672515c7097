from django.apps import AppConfig


class CoreConfig(AppConfig):
    """What all other apps stand on: the broker's connections, locks, leases, bulk statements, REST conventions."""

    name = "core"
