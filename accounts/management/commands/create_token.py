from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from accounts.access.tokens import DEFAULT_DAYS, create_token
from accounts.access.vouching import NotVouched
from accounts.models import AuthToken, normalize_address, owner_with_address


class Command(BaseCommand):
    help = "Create a token for the REST API and print only the token. It can't be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("email")
        parser.add_argument("--days", type=int, default=DEFAULT_DAYS, help="lifetime in days (default: %(default)s)")
        parser.add_argument(
            "--scope",
            choices=AuthToken.Scope.values,
            default=AuthToken.Scope.AGENT.value,
            help="agent: register queues; read: read all but messages and tokens; all: do what the owner may "
            "(default: %(default)s)",
        )
        parser.add_argument("--pulse-user", default="", metavar="NAME", help="with --scope read: only this Pulse user")

    def handle(self, *args: Any, **options: Any) -> None:
        email = normalize_address(options["email"])
        owner = owner_with_address(email)
        if owner is None:
            raise CommandError(f"There is no owner {email!r}; create one with: manage.py create_owner EMAIL --vouched")
        try:
            _, key = create_token(owner, "create_token", options["days"], options["scope"], options["pulse_user"])
        except NotVouched as error:
            raise CommandError(f"{error} Or run: manage.py create_owner {email} --vouched") from error
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        self.stdout.write(key)
