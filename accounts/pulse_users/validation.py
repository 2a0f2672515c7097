"""Which names and passwords a Pulse user may have, and which RabbitMQ users may become one."""

from collections.abc import Collection
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import models

from accounts.access.reserved_names import is_reserved
from accounts.models import Owner, PulseUser
from accounts.pulse_users.namespace import Belongings
from core import broker
from core.refusals import Refusal
from core.texts import has_control_characters
from rabbit import names, permissions
from rabbit.addresses import split_addresses
from rabbit.errors import BrokerUnavailable, NotOnBroker
from rabbit.management import Management
from rabbit.permissions import Permissions

MAX_PASSWORD_LENGTH = 255

MAX_NAMES_SHOWN = 10
"""Queues and exchanges named in an error."""

HARMLESS_TAGS = frozenset({"management", "monitoring"})
"""These tags only allow reading the management API. Other tags allow more than a Pulse user's permissions do."""


class NameRefused(Refusal):
    """A Pulse user can't be created or adopted with this name: it is invalid, reserved or taken."""

    field = "username"


def namespace_in_use(username: str, used: Belongings, by: Owner | None) -> NameRefused:
    """Return the refusal of a name of which the broker has queues or exchanges. It names them for operators only."""
    if by is None or by.is_staff:
        listed = [names.readable(name) for name in (*used.queues, *used.exchanges)]
        more = f", and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
        shown = ", ".join(listed[:MAX_NAMES_SHOWN]) + more
        return NameRefused(
            f"The broker already has queues or exchanges of this name: {shown}. Adopt them, or choose another name."
        )
    return NameRefused(
        f"The broker already has queues or exchanges of this name ({names.queue_prefix(username)}…, "
        f"{names.exchange_prefix(username)}…). Choose another name, or ask an operator, who can adopt them."
    )


def check_syntax(username: str) -> None:
    """Raise NameRefused unless the name follows the rules for names of Pulse users."""
    try:
        names.check_user_name(username)
    except names.InvalidUserName as error:
        raise NameRefused(str(error)) from error


def check_name(username: str) -> None:
    """Raise NameRefused if the name is invalid or reserved, or a Pulse user here has it.

    Sends no request to the broker. The name of an unfinished creation passes; :func:`create_pulse_user` checks its
    owners.
    """
    check_syntax(username)
    check_not_reserved(username)
    row = PulseUser.objects.filter(username=username).first()
    if row is None:
        return
    if row.removing_since is not None:
        raise NameRefused(f"'{username}' is being removed; wait until it is gone, or choose another name.")
    if row.ready:
        raise NameRefused(f"'{username}' is taken; choose another name.")


def check_not_reserved(username: str) -> None:
    """Raise NameRefused if no Pulse user can be created with this name, because it is reserved."""
    of_guardian = {name.casefold() for name in guardian_usernames()}
    if is_reserved(username) or username.casefold() in of_guardian:
        raise NameRefused(f"'{username}' is reserved; choose another name.")
    if names.is_agents_login(username):
        raise NameRefused("Names of 32 hex digits are reserved for agents' logins; choose another name.")


def check_password(password: str, username: str) -> None:
    """Raise ValidationError, on the field ``password``, unless this password is valid."""
    try:
        if settings.GUARDIAN_REQUIRE_GENERATED_PASSWORDS:
            raise ValidationError("Passwords are generated here. Leave yours out.")
        # SASL PLAIN separates name and password by a NUL.
        if has_control_characters(password):
            raise ValidationError("The password contains a control character, such as a line break. Remove it.")
        if len(password) > MAX_PASSWORD_LENGTH:
            raise ValidationError(f"The password is too long; at most {MAX_PASSWORD_LENGTH} characters are allowed.")
        validate_password(password, PulseUser(username=username))  # type: ignore[arg-type]  # it has a username
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from None


def is_free_on_broker(management: Management, username: str, *, allow_unfinished: bool) -> bool:
    """Return whether the name is free on the broker.

    With ``allow_unfinished``, a Pulse user that an unfinished creation left there counts as free.
    """
    try:
        tags = management.user(username).tags
    except NotOnBroker:
        return True
    if not allow_unfinished or tags:
        return False
    created = {settings.GUARDIAN_PULSE_VHOST: permissions.for_pulse_user(username)}
    return management.permissions_of(username) in ({}, created)


def grant_permissions(management: Management, username: str) -> None:
    """Set what the Pulse user may do in the Pulse vhost."""
    vhost = settings.GUARDIAN_PULSE_VHOST
    try:
        management.set_permissions(vhost, username, permissions.for_pulse_user(username))
    except NotOnBroker as error:
        raise BrokerUnavailable(
            f"The broker has no virtual host '{vhost}' for Pulse users, or lost the Pulse user again: {error}"
        ) from error


def live_row(pulse_user: PulseUser) -> models.QuerySet[PulseUser]:
    """Return a queryset of the Pulse user's row, empty if it is deleted or being removed."""
    return PulseUser.objects.filter(pk=pulse_user.pk, removing_since=None)


def require_operator(by: Owner) -> None:
    """Raise PermissionDenied unless this owner, as an operator, may adopt what the broker has."""
    if not by.is_staff:
        raise PermissionDenied("Only operators can adopt RabbitMQ users, queues and exchanges.")


def why_not_ownable(username: str, tags: Collection[str] = ()) -> str:
    """Return why a Pulse user with these tags must not have owners, or "" if it may."""
    if username in guardian_usernames():
        return f"'{username}' is the RabbitMQ user that Guardian itself uses."
    if names.is_agents_login(username):
        return f"'{username}' has the name of an agent's login. Guardian creates and removes these with registrations."
    powerful_tags = sorted(set(tags) - HARMLESS_TAGS)
    if "administrator" in powerful_tags:
        return f"'{username}' is an administrator of the broker."
    if powerful_tags:
        return (
            f"'{username}' has the tag {', '.join(powerful_tags)} on the broker, which allows more than its "
            "permissions do. An operator can remove the tag on the broker."
        )
    return ""


def guardian_usernames() -> set[str]:
    """Return the names of the RabbitMQ users that Guardian itself uses."""
    urls = split_addresses(settings.RABBITMQ_MANAGEMENT_URL) + split_addresses(settings.RABBIT_URL)
    return {unquote(urlsplit(url).username or "guest") for url in urls}


def is_valid_name(name: str) -> bool:
    try:
        names.check_user_name(name)
    except names.InvalidUserName:
        return False
    return True


def permissions_of(pulse_user: PulseUser) -> dict[str, Permissions]:
    """Return the Pulse user's permissions on the broker, by vhost. Raises NotOnBroker if there is no such user."""
    return broker.management().permissions_of(pulse_user.username)
