from django.apps import AppConfig


class QueuesConfig(AppConfig):
    """The guarded queues."""

    name = "queues"

    def ready(self) -> None:
        """Register what notifications say of queues, and listen to what happens to Pulse users."""
        from queues import kinds, receivers, subject  # noqa: F401 - models can't be imported before
