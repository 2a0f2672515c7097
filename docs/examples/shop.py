"""A small shop: an order is checked and written down, and what was ordered is sent on to be packed.

Two consumers and one publisher, which know each other by routing keys alone. `docs/consumers.md` says how to run it.
"""

import sys
import uuid

from guardian_consumers import Discard, Message, Park, Publisher, Settings


def orders(message: Message) -> None:
    """Take an order, and ask for each of its things to be packed."""
    order = message.body
    if not order.get("things"):
        raise Discard("nothing was ordered")
    if order["customer"] == "nobody":
        raise Park("nobody can't pay; a person has to look at this")
    print(f"order {order['number']} of {order['customer']}", flush=True)
    # Last of all, after whatever can fail: should this fail midway, the order comes again, and so would these. The id
    # is made of the order's, so that whoever packs can tell.
    for thing in order["things"]:
        message.publish({"thing": thing}, "packing", message_id=f"{message.id}-{thing}")


def packing(message: Message) -> None:
    """Pack one thing. Fragile ones break the first time, and are tried again later."""
    thing = message.body["thing"]
    if thing == "glass" and not message.attempts:
        raise RuntimeError("it broke")
    print(f"packed {thing}, try {message.attempts + 1}", flush=True)


def order(customer: str, things: list[str]) -> None:
    """Publish an order."""
    number = uuid.uuid4().hex[:8]
    with Publisher(Settings.from_environment()) as publisher:
        # Mandatory: an order that nobody reads is an error here, and not lost.
        publisher.publish(
            {"number": number, "customer": customer, "things": things}, "orders", message_id=number, mandatory=True
        )


if __name__ == "__main__":
    order(sys.argv[1], sys.argv[2:])
