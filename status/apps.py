from django.apps import AppConfig


class StatusConfig(AppConfig):
    name = "status"

    def ready(self) -> None:
        from django.db.models.signals import post_save

        from core import broker
        from queues.guard.recording import deletions_recorded
        from status import counters

        broker.listeners.append(counters.count_call)
        post_save.connect(counters.count_pass, sender="queues.Pass")
        deletions_recorded.connect(counters.count_deletions)
        post_save.connect(counters.count_sweep, sender="agents.Sweep")
