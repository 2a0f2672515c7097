"""A small shop: one consumer accepts orders, and another packs their items.

`docs/consumers.md` says how to run it.
"""

import sys
import uuid

from guardian_consumers import Discard, Message, Park, Publisher, Settings


def orders(message: Message) -> None:
    """Accept an order, and request the packing of each item."""
    order = message.body
    if not order.get("things"):
        raise Discard("the order is empty")
    if order["customer"] == "nobody":
        raise Park("nobody can't pay; an operator decides")
    print(f"order {order['number']} of {order['customer']}", flush=True)
    # Publish last. If this fails midway, the order is retried and its items are published again, with the same ids.
    for thing in order["things"]:
        message.publish({"thing": thing}, "packing", message_id=f"{message.id}-{thing}")


def packing(message: Message) -> None:
    """Pack one item. Glass breaks at the first attempt, and is retried."""
    thing = message.body["thing"]
    if thing == "glass" and not message.attempts:
        raise RuntimeError("it broke")
    print(f"packed {thing}, try {message.attempts + 1}", flush=True)


def order(customer: str, things: list[str]) -> None:
    """Publish an order."""
    number = uuid.uuid4().hex[:8]
    with Publisher(Settings.from_environment()) as publisher:
        # Mandatory: without a queue, publishing raises Unroutable. Otherwise the broker would drop the order.
        publisher.publish(
            {"number": number, "customer": customer, "things": things}, "orders", message_id=number, mandatory=True
        )


if __name__ == "__main__":
    order(sys.argv[1], sys.argv[2:])
