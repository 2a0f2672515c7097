"""The queues that agents registered, for the monitor's passes."""

from collections.abc import Collection

from agents.models import AgentVhost, Consumer, Registration, SubscriptionQueue
from agents.removal import handlers
from agents.sweeps import repair
from core import bulk
from rabbit import names


def registered_queues() -> dict[tuple[str, str], int]:
    """Return the owner's id of each queue that agents registered, by (vhost, name), in three statements.

    The dead-letter queues of the agents' vhosts are included.
    """
    queues = SubscriptionQueue.objects.order_by().values_list("vhost", "queue_name", "subscription__owner_id")
    consumers = Consumer.objects.order_by().values_list("vhost", "queue_name", "identity__owner_id")
    found = {(vhost, name): owner for rows in (queues, consumers) for vhost, name, owner in rows}
    return found | {(vhost, names.DEAD_LETTER_QUEUE): owner for vhost, owner in agent_vhosts().items()}


def agent_vhosts() -> dict[str, int]:
    """Return the owner's id of each agents' vhost that the broker has, in one statement."""
    return dict(AgentVhost.objects.filter(ready=True).values_list("name", "owner_id"))


def mark_vanished(names: Collection[tuple[str, str]]) -> None:
    """Record that the broker has lost these registered queues, given as (vhost, name), in two statements.

    The end of the pass, or the agent's next request, declares them again.
    """
    if not names:
        return
    for model in (SubscriptionQueue, Consumer):
        these = bulk.among(model, ("vhost", "queue_name"), list(names))
        model._default_manager.filter(these, state=Registration.READY).update(state=Registration.CREATING)


class RegisteredByAgents:
    """The provider of agents' queues for passes: see ``queues.guard.registered.RegisteredQueues``."""

    vhosts = staticmethod(agent_vhosts)
    queues = staticmethod(registered_queues)
    pending_removals = staticmethod(handlers.pending)
    record_missing = staticmethod(mark_vanished)
    declare_missing = staticmethod(repair.repair_after_pass)
