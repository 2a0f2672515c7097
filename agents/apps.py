from django.apps import AppConfig


class AgentsConfig(AppConfig):
    """Agents, and the queues that they register."""

    name = "agents"

    def ready(self) -> None:
        """Connect the receivers, and register handlers and providers with lower packages."""
        # Models can't be imported earlier. The receivers in deletions.py keep queues from being left on the broker.
        from agents import deletions, kinds, receivers, removals  # noqa: F401
        from agents.registered import RegisteredByAgents
        from agents.reports import old_reports
        from queues import pruning
        from queues.registered import register

        register(RegisteredByAgents())
        removals.register_handlers()
        pruning.also_pruned.append(old_reports)
