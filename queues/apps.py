from django.apps import AppConfig


class QueuesConfig(AppConfig):
    """The guarded queues."""

    name = "queues"

    def ready(self) -> None:
        """Register the kinds and subjects of notifications about queues, and connect the receivers."""
        from queues import kinds, receivers, subject  # noqa: F401 - models can't be imported before
