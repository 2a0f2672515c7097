"""The queues that agents registered: the provider for passes that ``queues.guard.registered`` describes."""

from collections.abc import Collection

from agents.models import REGISTERED, AgentVhost, Registration
from agents.removal.handlers import pending as pending_removals
from agents.sweeps.repair import repair_after_pass as declare_missing
from core import bulk
from rabbit import names

__all__ = ["declare_missing", "pending_removals", "queues", "record_missing", "vhosts"]


def queues() -> dict[tuple[str, str], int]:
    """Return the owner's id of each queue that agents registered, and of each dead-letter queue of their vhosts."""
    found = {}
    for model in REGISTERED:
        rows = model._default_manager.order_by()
        for vhost, name, owner in rows.values_list("vhost", "queue_name", f"{model.OWNER_FIELD}_id"):
            found[vhost, name] = owner
    return found | {(vhost, names.DEAD_LETTER_QUEUE): owner for vhost, owner in vhosts().items()}


def vhosts() -> dict[str, int]:
    return dict(AgentVhost.objects.filter(ready=True).values_list("name", "owner_id"))


def record_missing(names: Collection[tuple[str, str]]) -> None:
    """Record that the broker has lost these registered queues, given as (vhost, name), in two statements.

    The end of the pass, or the agent's next request, declares them again.
    """
    if not names:
        return
    for model in REGISTERED:
        these = bulk.among(model, ("vhost", "queue_name"), list(names))
        model._default_manager.filter(these, state=Registration.READY).update(state=Registration.CREATING)
