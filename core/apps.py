from django.apps import AppConfig


class CoreConfig(AppConfig):
    """What all apps share: broker connections, locks and leases, bulk statements, REST conventions, rate limits."""

    name = "core"

    def ready(self) -> None:
        """Register the system check of the database's version."""
        from core import checks  # noqa: F401
