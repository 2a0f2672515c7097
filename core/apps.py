from django.apps import AppConfig


class CoreConfig(AppConfig):
    name = "core"

    def ready(self) -> None:
        """Register the system check of the database's version."""
        from core import checks  # noqa: F401
