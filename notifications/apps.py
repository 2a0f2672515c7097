from django.apps import AppConfig


class NotificationsConfig(AppConfig):
    """The outbox, and how owners are notified."""

    name = "notifications"

    def ready(self) -> None:
        """Connect the receivers."""
        from notifications import receivers  # noqa: F401 - models can't be imported before
