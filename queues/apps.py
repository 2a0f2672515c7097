from django.apps import AppConfig


class QueuesConfig(AppConfig):
    name = "queues"

    def ready(self) -> None:
        """Register the kinds and subjects of notifications about queues, and connect the receivers."""
        # Models can't be imported before.
        from queues import receivers  # noqa: F401
        from queues.mails import kinds, subject  # noqa: F401
