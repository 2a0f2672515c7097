import contextlib
import json
import uuid
from argparse import ArgumentParser
from typing import Any

import orjson
from django.core.management.base import BaseCommand, CommandError

from agents.events import publishing
from agents.events.publishing import Published
from agents.models import ObjectType, Offering
from core.refusals import Refusal
from rabbit.errors import BrokerError


class Command(BaseCommand):
    help = "Publish an event to the agents that registered for its offering and type, and print the result."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("offering", help="its UUID, or its name if only one offering has it")
        parser.add_argument("type", help=f"one of: {', '.join(ObjectType.values)}")
        parser.add_argument("json", help="the payload, a JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Exit with 1 if nothing was published or the outcome is unknown."""
        offering = _find(options["offering"])
        try:
            orjson.loads(options["json"])  # stricter
            payload = json.loads(options["json"])  # doesn't turn large integers into floats
        except (ValueError, RecursionError) as error:
            raise CommandError(f"The payload is not valid JSON: {error}.") from error
        try:
            published = publishing.publish(offering, options["type"], payload)
        except (Refusal, BrokerError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(in_words(published))


def in_words(published: Published) -> str:
    return (
        f"{published.delivered} delivered, {published.skipped} skipped, {published.rejected} rejected as full, "
        f"{published.unreachable} unreachable, {published.gone} gone; the message id is {published.message_id}."
    )


def _find(text: str) -> Offering:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CommandError(f"{text!r} is not a valid offering: it is not UTF-8.") from error
    with contextlib.suppress(ValueError, Offering.DoesNotExist):
        return Offering.objects.get(uuid=uuid.UUID(text))
    found = list(Offering.objects.filter(name=text)[:2])
    if not found:
        raise CommandError(f"There is no offering {text!r}; create one with: manage.py create_offering NAME")
    if len(found) > 1:
        raise CommandError(f"Several offerings have the name {text!r}; give the UUID of one.")
    return found[0]
