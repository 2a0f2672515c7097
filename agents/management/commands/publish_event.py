import json
import uuid
from argparse import ArgumentParser
from typing import Any

import orjson
from django.core.management.base import BaseCommand, CommandError

from agents import events
from agents.events import InvalidPayload, Published
from agents.identities import NoSuchObjectType
from agents.models import ObjectType, Offering
from rabbit.management import BrokerError


class Command(BaseCommand):
    """Publish an event."""

    help = "Publish an event to the agents that registered for its offering and its type, and say what became of it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the offering, the type and the payload."""
        parser.add_argument("offering", help="its UUID, or its name where only one is called so")
        parser.add_argument("type", help=f"one of: {', '.join(ObjectType.values)}")
        parser.add_argument("json", help="the payload, a JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Publish it. It ends with 1 where nothing was published, or the outcome is unknown."""
        offering = _find(options["offering"])
        try:
            orjson.loads(options["json"])  # the stricter of the two
            payload = json.loads(options["json"])  # the one that makes no float of a large integer
        except (ValueError, RecursionError) as error:
            raise CommandError(f"The payload isn't JSON: {error}.") from error
        try:
            published = events.publish(offering, options["type"], payload)
        except (NoSuchObjectType, InvalidPayload, BrokerError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(in_words(published))


def in_words(published: Published) -> str:
    """Return what became of an event as a person reads it."""
    return (
        f"{published.delivered} delivered, {published.skipped} skipped, {published.rejected} rejected as full, "
        f"{published.gone} gone; the message id is {published.message_id}."
    )


def _find(text: str) -> Offering:
    """Return the offering with this UUID or this name."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CommandError(f"{text!r} can't be an offering: it isn't written in UTF-8.") from error
    try:
        condition = {"uuid": uuid.UUID(text)}
    except ValueError:
        condition = {}
    found = list(Offering.objects.filter(**condition)[:1]) if condition else []
    found = found or list(Offering.objects.filter(name=text)[:2])
    if not found:
        raise CommandError(f"There is no offering {text!r}; make one with: manage.py create_offering NAME")
    if len(found) > 1:
        raise CommandError(f"Several offerings are called {text!r}; give the UUID of one.")
    return found[0]
