from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from accounts.access.vouching import vouch
from accounts.models import Owner, normalize_address, owner_with_address
from accounts.signing_in.owners import mark_address_verified


class Command(BaseCommand):
    help = "Create an owner. If the owner exists, grant what the options say and take nothing away."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("email")
        parser.add_argument("--operator", action="store_true", help="the owner runs this installation")
        parser.add_argument("--vouched", action="store_true", help="the owner may use the broker")

    def handle(self, *args: Any, **options: Any) -> None:
        owner = owner_with_address(options["email"])
        is_new = owner is None
        if owner is None:
            owner = Owner(email=normalize_address(options["email"]))
            owner.set_unusable_password()
        if options["operator"]:
            owner.is_staff = owner.is_superuser = True
        try:
            owner.full_clean(exclude=["password"])
        except ValidationError as error:
            raise CommandError(f"{options['email']!r} can't be an owner: {' '.join(error.messages)}") from error
        owner.save()
        mark_address_verified(owner)
        if (options["operator"] or options["vouched"]) and not owner.vouched:
            vouch(owner, None, "By the command create_owner")
        kind = "operator" if owner.is_staff else "owner with access" if owner.vouched else "owner without access"
        self.stdout.write(f"{owner.email}: {'created' if is_new else 'exists'}; {kind}")
