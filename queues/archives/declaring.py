"""Declare and bind the queue of a restore, before its first message is sent.

Repeating it changes nothing, so a restore that was killed is begun again here.
"""

from django.utils import timezone

from queues.models import Replay
from queues.rules.restoring import LeftOut, binding_name
from rabbit.amqp import NODE_DOWN, Session
from rabbit.errors import BrokerUnavailable, NotOnBroker, Refused

GONE = "the exchange does not exist"


def declare(session: Session, replay: Replay) -> None:
    """Declare the queue, bind it, and record that. What can't be bound any more is added to what is left out.

    Raises Refused if the queue exists by now with another declaration.
    """
    plan = replay.restore
    try:
        session.declare_queue(
            replay.to_queue, durable=plan["durable"], auto_delete=plan["auto_delete"], arguments=plan["arguments"]
        )
    except NotOnBroker as error:
        if NODE_DOWN in str(error):
            raise BrokerUnavailable(str(error)) from error
        raise
    except Refused as error:
        text = (
            "Nothing was sent, because the queue could not be declared. If it exists by now, bring back its messages "
            f"once more. The broker's reason: {error.reason}"
        )
        raise Refused(text, status=error.status, reason=error.reason) from error
    bound, left_out = [], list(plan["left_out"])
    for one in plan["bindings"]:
        try:
            session.bind_queue(replay.to_queue, one["exchange"], one["routing_key"], one["arguments"])
            bound.append(one)
        except (NotOnBroker, Refused) as error:
            why = GONE if isinstance(error, NotOnBroker) else f"the broker refuses: {error.reason}"
            left_out.append(LeftOut(f"the binding to {binding_name(one)}", why)._asdict())
    replay.restore, replay.declared_at = {**plan, "bindings": bound, "left_out": left_out}, timezone.now()
    replay.save(update_fields=["restore", "declared_at"])
