"""The password of a login is the token presented last.

Only the broker stores it; the row refers to the token. Before the request to the broker, the token is stored as
``next_token``, beside the current one. Until the answer arrives, the password may be either token, so revoking either
one resets the password.
"""

from typing import Any, NamedTuple

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet

from accounts.models import AuthToken
from agents.models import Consumer, EventSubscription
from agents.registration import records
from agents.registration.records import Busy, remove_later
from agents.registration.vhosts import in_vhost
from agents.removal import handlers
from core import locks
from core.models import Removal
from rabbit.errors import BrokerUnavailable
from rabbit.management import Management

PASSWORD_FIELDS = ["token", "next_token", "password_set"]


class PresentedToken(NamedTuple):
    """The token of a request. ``key`` is the plaintext token, a secret."""

    token: AuthToken
    key: str

    def __repr__(self) -> str:
        return f"<PresentedToken {self.token.uuid}>"


def _is_granted(login: EventSubscription | Consumer, presented: PresentedToken) -> bool:
    return login.password_set and login.token_id == presented.token.pk and login.next_token_id is None


def grant_login(login: EventSubscription | Consumer, presented: PresentedToken, management: Management) -> None:
    """Make the presented token the password of a login, which may only read its own queues."""
    # Read again: creating a lost vhost again clears password_set of its logins.
    login.refresh_from_db(fields=PASSWORD_FIELDS)
    if _is_granted(login, presented):
        return
    username = login.rmq_username
    rows = type(login)._default_manager.filter(pk=login.pk)
    try:
        with locks.lock(username, wait=records.WAIT_SECONDS) as lock:
            login.refresh_from_db(fields=PASSWORD_FIELDS)
            if _is_granted(login, presented):
                return
            _record_next_token(login, presented.token)
            try:
                _put_user(login, presented, lock.renewing_client(management))
            finally:
                if not rows.exists():
                    # Its user was removed with it, maybe before the broker created it.
                    remove_later(Removal(kind=Removal.Kind.USER, name=username))
            is_set = _record_token(rows, presented.token)
            login.refresh_from_db(fields=PASSWORD_FIELDS)
    except locks.LockTaken as error:
        raise Busy(f"The login '{username}' is being changed by another request; try again") from error
    if not is_set:
        if AuthToken.objects.filter(pk=presented.token.pk).exists():
            raise Busy(f"The login '{username}' was changed by another request; try again")
        raise _revoked()


def _record_next_token(login: EventSubscription | Consumer, token: AuthToken) -> None:
    """Store the next token before it becomes the password, so that revoking it resets the password.

    The current token stays stored until the broker has the next one.
    """
    with transaction.atomic():
        if not _lock_token(token):
            raise _revoked()
        type(login)._default_manager.filter(pk=login.pk).update(next_token=token)
        if login.next_token_id not in (None, token.pk):
            # The broker may have the previous next token as the password, and the row no longer refers to it.
            handlers.schedule_password_reset(login.rmq_username)


def _record_token(rows: QuerySet[Any], token: AuthToken) -> bool:
    """Record that this token is the password now. Return False if it was revoked or another request replaced it."""
    with transaction.atomic():
        _lock_token(token)
        return bool(rows.filter(next_token=token).update(token=token, next_token=None, password_set=True))


def _lock_token(token: AuthToken) -> bool:
    """Lock a token, to prevent its revocation, before locking its logins. Return False if it doesn't exist."""
    return AuthToken.objects.select_for_update(no_key=True).filter(pk=token.pk).first() is not None


def _put_user(login: EventSubscription | Consumer, presented: PresentedToken, management: Management) -> None:
    username, vhost = login.rmq_username, login.owner.uuid.hex
    management.put_user(username, presented.key)
    try:
        in_vhost(login.owner, management, lambda: management.set_permissions(vhost, username, login.permissions))
    except BrokerUnavailable as error:
        error.never_reached = False  # the user has been created
        raise


def _revoked() -> PermissionDenied:
    return PermissionDenied("The token was revoked. Create another on the page Tokens.")
