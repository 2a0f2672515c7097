from django.apps import AppConfig


class QueuesConfig(AppConfig):
    """What is guarded, and who is told of it."""

    name = "queues"

    def ready(self) -> None:
        """Listen to what happens to owners and their accounts."""
        from queues import kinds, receivers, subject  # noqa: F401 - models can't be imported before
