"""A job for the workers of the message store; see docs/message-store-workers.md."""

from message_store.worker import Message


def send(message: Message, context: None) -> None:
    """Print a message."""
    print(message.queue, message.partition, message.body.decode(), flush=True)
