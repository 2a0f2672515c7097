import uuid
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from accounts.access.vouching import NotVouched, require_vouched
from accounts.models import Owner, normalize_address, owner_with_address
from agents.models import check_offering_name
from agents.offerings import save_offering


class Command(BaseCommand):
    help = "Create an offering and print its UUID. If the UUID exists, rename it and add members and publishers."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--uuid", help="the UUID of the offering in another system (default: a new one)")
        emails: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "EMAIL"}
        parser.add_argument("--member", **emails, help="an owner whose agents may subscribe to its events")
        parser.add_argument("--publisher", **emails, help="an owner who may publish its events")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["name"]
        try:
            check_offering_name(name)
        except ValidationError as error:
            raise CommandError(f"{name!r} is not a valid name: {' '.join(error.messages)}") from error
        try:
            given = uuid.UUID(options["uuid"]) if options["uuid"] is not None else uuid.uuid4()
        except ValueError as error:
            raise CommandError(f"{options['uuid']!r} is not a UUID.") from error
        members, publishers = _owners(options["member"]), _owners(options["publisher"])
        offering = save_offering(given, name, members, publishers)
        self.stdout.write(offering.uuid.hex)


def _owners(emails: Iterable[str]) -> list[Owner]:
    owners = []
    for email in dict.fromkeys(map(normalize_address, emails)):
        try:
            email.encode()
        except UnicodeEncodeError as error:
            raise CommandError(f"{email!r} is not a valid address: it is not UTF-8.") from error
        owner = owner_with_address(email)
        if owner is None:
            raise CommandError(f"There is no owner {email!r}; create one with: manage.py create_owner EMAIL --vouched")
        try:
            require_vouched(owner)
        except NotVouched as error:
            raise CommandError(f"{error} Or run: manage.py create_owner {email} --vouched") from error
        owners.append(owner)
    return owners
