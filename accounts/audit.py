"""The audit trail: who did what to what, and when.

Entries come from three places:

- changes to rows of watched models (:func:`watch`);
- actions that change no row, or many rows in bulk (:func:`record`, :func:`record_changes`);
- requests to the broker, recorded before they are sent, so that an entry exists whatever the outcome
  (:func:`audited`).

The actor is the user of the request, by session or token, unless the caller names another one. Without a request, the
entry names the command or the task. Watched fields are listed one by one, so that no secret gets into the trail.

Traffic is not audited: registrations of agents, published events, reads. Sign-ins on a page are audited, requests with
a token are not. A sign-in succeeds even if its entry can't be written.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from auditlog.cid import get_cid
from auditlog.registry import auditlog
from auditlog.signals import pre_log
from celery import current_task
from django.contrib.auth.signals import user_logged_in
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, transaction
from django.db.models import Model
from django.db.models.signals import pre_save
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from accounts.allauth_private import client_address
from accounts.models import AuditEntry, AuthToken, NotificationAddress, Owner, PulseUser
from core import locks
from rabbit.errors import BrokerError, was_not_executed

logger = logging.getLogger(__name__)

CREATED, CHANGED, DELETED = "created", "changed", "deleted"
_EVENTS = {AuditEntry.Action.CREATE: CREATED, AuditEntry.Action.UPDATE: CHANGED, AuditEntry.Action.DELETE: DELETED}

MAX_REASON_LENGTH = 300

_request: ContextVar[HttpRequest | None] = ContextVar("audit_request", default=None)

_command: ContextVar[str] = ContextVar("audit_command", default="")


class Middleware:
    """Keep the current request, so that audit entries name its user and its address.

    The user is looked up only when an entry is written. auditlog's middleware looks up the user at each request,
    doesn't support tokens, and trusts the address that the client sends.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        before = _request.set(request)
        try:
            return self.get_response(request)
        finally:
            _request.reset(before)


def actor() -> Owner | None:
    """Return the user of the current request, or None if there is no request or no signed-in user."""
    request = _request.get()
    user = getattr(request, "user", None)
    # REST framework stores the owner of a token here, too, once it has authenticated the request.
    return user if isinstance(user, Owner) and user.is_authenticated else None


@contextmanager
def by_command(command: str) -> Iterator[None]:
    """Name this command in the entries that are written inside the ``with`` block, with what it works on."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def command() -> str:
    """Return the command that runs, or an empty text in a request or a task."""
    is_command = Path(sys.argv[0]).name == "manage.py" and len(sys.argv) > 1
    return _command.get() or (sys.argv[1] if is_command else "")


def watch(model: type[Model], fields: Collection[str], many_to_many: Collection[str] = ()) -> None:
    """Write an entry when a row of this model is created, deleted, or saved with a change to these fields.

    Each entry costs one statement, and each update of a row one more. Do not watch models whose rows are written in
    bulk or by agents.
    """
    auditlog.register(model, include_fields=list(fields), m2m_fields=set(many_to_many))


def is_watched(model: type[Model]) -> bool:
    return bool(auditlog.contains(model))


def record(by: Owner | None, action: str, thing: Model | Sequence[Model] | None, **details: Any) -> None:
    """Write an entry for an action, such as "purged". ``by`` is by default the user of the request, if any.

    Several things of one model share an entry. ``details`` are texts, numbers, and lists or mappings of these; never
    secrets.
    """
    _entry(by, action, thing, details).save()


class Change(NamedTuple):
    """A changed row, with the values of its fields before and after."""

    thing: Model
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def record_changes(by: Owner | None, changes: Iterable[Change]) -> None:
    """Write an entry for each changed row of a model that isn't watched, in one statement."""
    entries = []
    for thing, before, after in changes:
        entry = _entry(by, CHANGED, thing, {})
        entry.action = AuditEntry.Action.UPDATE
        entry.changes = {
            name: [str(before[name]), str(value)] for name, value in after.items() if before[name] != value
        }
        add_context(AuditEntry, entry)
        entries.append(entry)
    AuditEntry.objects.bulk_create(entries)


@contextmanager
def audited(by: Owner | None, action: str, thing: Model | None, **details: Any) -> Iterator[None]:
    """Write an entry before a request to the broker, and its outcome afterwards.

    The outcome stays "unknown" if no answer arrives or the process is killed. It is "not done" if the lock of the
    Pulse user was lost, because then no request was sent.
    """
    entry = _entry(by, action, thing, details)
    entry.outcome = AuditEntry.Outcome.UNKNOWN
    entry.save()
    try:
        yield
    except BrokerError as error:
        entry.additional_data = {**(entry.additional_data or {}), "why": str(error)[:MAX_REASON_LENGTH]}
        if was_not_executed(error):
            entry.outcome = AuditEntry.Outcome.NOT_DONE
        entry.save(update_fields=["outcome", "additional_data"])
        raise
    except locks.LockTaken:
        entry.outcome = AuditEntry.Outcome.NOT_DONE
        entry.save(update_fields=["outcome"])
        raise
    entry.outcome = AuditEntry.Outcome.DONE
    entry.save(update_fields=["outcome"])


def _entry(by: Owner | None, action: str, thing: Model | Sequence[Model] | None, details: dict[str, Any]) -> AuditEntry:
    entry = AuditEntry(event=action, action=AuditEntry.Action.ACCESS, actor=by, additional_data=details, cid=get_cid())
    things = [thing] if isinstance(thing, Model) else thing or []
    if things:
        entry.content_type = ContentType.objects.get_for_model(things[0])
        entry.object_repr = ", ".join(str(one) for one in things)
    if len(things) == 1:
        # A token's primary key is its digest, which must not be in the trail.
        key = things[0].uuid if isinstance(things[0], AuthToken) else things[0].pk
        entry.object_pk, entry.object_id = str(key), key if isinstance(key, int) else None
    return entry


@receiver(pre_save, sender=AuditEntry)
def add_context(sender: type[AuditEntry], instance: AuditEntry, **_: Any) -> None:
    """Add the actor, the origin and the address to a new entry. Entries written by auditlog lack these."""
    if not instance._state.adding:
        return
    request = _request.get()
    instance.actor = instance.actor or actor()
    instance.actor_email = instance.actor.email if instance.actor else ""
    instance.event = instance.event or _EVENTS[instance.action]
    instance.additional_data = {**_origin(request), **(instance.additional_data or {})}
    instance.remote_addr = (client_address(request) or None) if request is not None else None


@receiver(pre_log, sender=Owner)
def should_log(sender: type[Owner], action: int, **_: Any) -> bool:
    """Return whether to log a change. Skip owners created by an anonymous sign-in, which could flood the trail."""
    return action != AuditEntry.Action.CREATE or _request.get() is None or actor() is not None


@receiver(user_logged_in)
def record_sign_in(sender: Any, user: Owner, **_: Any) -> None:
    """Write an entry for a sign-in. A failure to write is logged and doesn't block the sign-in."""
    if _request.get() is None:
        return
    try:
        with transaction.atomic():
            record(user, "signed in", user)
    except DatabaseError:
        logger.exception("Could not write the sign-in of %s to the audit trail", user)


def _origin(request: HttpRequest | None) -> dict[str, str]:
    if request is not None:
        token = getattr(request, "auth", None)
        return {"token": str(token)} if isinstance(token, AuthToken) else {}
    if current_task:
        return {"task": current_task.name}
    return {"command": name} if (name := command()) else {}


watch(
    Owner,
    (
        "email", "full_name", "vouched", "is_staff", "is_superuser", "is_active", "time_zone", "quiet_from",
        "quiet_until", "weekly_summary",
    ),
)  # fmt: skip
watch(
    PulseUser, ("username", "warn_length", "max_length", "keeps_archives", "hold_off_minutes"), many_to_many=("owners",)
)
watch(NotificationAddress, ("email", "pulse_user", "confirmed_at"))
