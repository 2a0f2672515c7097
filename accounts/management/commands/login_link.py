from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accounts.models import owner_with_address
from accounts.signing_in.links import create_link


class Command(BaseCommand):
    help = "Print a link that signs this owner in once, within 10 minutes. Give it to nobody else."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("email")

    def handle(self, *args: Any, **options: Any) -> None:
        owner = owner_with_address(options["email"])
        if owner is None:
            raise CommandError(f"There is no owner {options['email']!r}; create one with: manage.py create_owner EMAIL")
        if not owner.is_active:
            raise CommandError(f"{owner.email} is deactivated and can't sign in.")
        self.stdout.write(create_link(owner))
