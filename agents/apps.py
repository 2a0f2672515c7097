from django.apps import AppConfig


class AgentsConfig(AppConfig):
    name = "agents"

    def ready(self) -> None:
        # Models can't be imported earlier. The receivers in deletions.py keep queues from being left on the broker.
        from agents import receivers  # noqa: F401
        from agents.removal import deletions, handlers  # noqa: F401
        from agents.sweeps import kinds, registered  # noqa: F401
        from agents.sweeps.reports import old_reports
        from queues.guard import pruning
        from queues.guard.registered import register

        register(registered)
        handlers.register_handlers()
        pruning.also_pruned.append(old_reports)
