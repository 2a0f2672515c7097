"""A job for the workers of the message store; see docs/message-store-workers.md."""

from guardian_store import Message


def send(message: Message, context: None) -> None:
    """Print a message."""
    print(message.queue, message.partition, message.text, flush=True)
