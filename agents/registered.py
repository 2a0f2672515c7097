"""Which queues agents registered, for the passes over all queues."""

from collections.abc import Collection

from agents import removals
from agents.models import AgentVhost, Consumer, Registration, SubscriptionQueue
from core import bulk
from rabbit import names


def registered_queues() -> dict[tuple[str, str], int]:
    """Return the queues that agents registered, as (vhost, name), and whose they are, by the owner's id.

    The dead-letter queues of their vhosts are among them. In three statements.
    """
    queues = SubscriptionQueue.objects.order_by().values_list("vhost", "queue_name", "subscription__owner_id")
    consumers = Consumer.objects.order_by().values_list("vhost", "queue_name", "identity__owner_id")
    found = {(vhost, name): owner for rows in (queues, consumers) for vhost, name, owner in rows}
    return found | {(vhost, names.DEAD_LETTER_QUEUE): owner for vhost, owner in agent_vhosts().items()}


def agent_vhosts() -> dict[str, int]:
    """Return the vhosts of agents that the broker has, and whose they are, by the owner's id. In one statement."""
    return dict(AgentVhost.objects.filter(ready=True).values_list("name", "owner_id"))


def mark_vanished(names: Collection[tuple[str, str]]) -> None:
    """Note that the broker has these registered queues, given as (vhost, name), no longer. In two statements.

    They are being made again, by the agent's next call or the sweep.
    """
    _set_state(names, Registration.READY, Registration.CREATING)


def mark_returned(names: Collection[tuple[str, str]]) -> None:
    """Note that the broker has these registered queues, given as (vhost, name), again. In two statements."""
    _set_state(names, Registration.CREATING, Registration.READY)


def _set_state(names: Collection[tuple[str, str]], before: Registration, after: Registration) -> None:
    if not names:
        return
    for model in (SubscriptionQueue, Consumer):
        these = bulk.among(model, ("vhost", "queue_name"), list(names))
        model._default_manager.filter(these, state=before).update(state=after)


class RegisteredByAgents:
    """What a pass has to know of agents' queues: see ``queues.registered.RegisteredQueues``."""

    vhosts = staticmethod(agent_vhosts)
    queues = staticmethod(registered_queues)
    pending_removals = staticmethod(removals.pending)
    record_missing = staticmethod(mark_vanished)
    record_returned = staticmethod(mark_returned)
