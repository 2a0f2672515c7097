from django.apps import AppConfig


class AgentsConfig(AppConfig):
    """Agents, and the queues that they register."""

    name = "agents"

    def ready(self) -> None:
        """Listen to deletions of what stands for something on the broker, and tell passes what is registered."""
        # Models can't be imported before. The receivers in deletions.py keep queues from being left on the broker.
        from agents import deletions, kinds, receivers, removals  # noqa: F401
        from agents.registered import RegisteredByAgents
        from agents.reports import old_reports
        from queues import pruning
        from queues.registered import register

        register(RegisteredByAgents())
        removals.register_handlers()
        pruning.also_pruned.append(old_reports)
