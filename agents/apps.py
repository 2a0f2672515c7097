from django.apps import AppConfig


class AgentsConfig(AppConfig):
    """Agents, and the queues that they register."""

    name = "agents"

    def ready(self) -> None:
        """Listen to deletions of what stands for something on the broker, and tell passes what is registered."""
        from agents import kinds, receivers  # noqa: F401 - models can't be imported before
        from agents.registered import RegisteredByAgents
        from agents.reports import old_reports
        from queues import pruning
        from queues.registered import register

        register(RegisteredByAgents())
        pruning.also_pruned.append(old_reports)
