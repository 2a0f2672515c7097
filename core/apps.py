from django.apps import AppConfig


class CoreConfig(AppConfig):
    """What all other apps stand on: the broker's connections, locks, leases, bulk statements, REST conventions."""

    name = "core"

    def ready(self) -> None:
        """Register the check of the database's version."""
        from core import checks  # noqa: F401
