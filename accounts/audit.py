"""The audit trail: who did what to what, and when.

Three things write into it. Rows that people change are watched (:func:`watch`). What changes no row, or changes many at
once, is noted where it is done (:func:`note`, :func:`record_changes`). What is asked of the broker is written down before, so
that it is there whatever becomes of the answer (:func:`audited`).

Who it was is whoever sent the request, by a session or by a token, unless whoever notes it says otherwise. What no
request did, a command or a task did, and the entry names that. No secret is in it: what is watched is named field by
field.

Not in it is traffic: what agents register and read, the events that are published, and what is looked at. Whoever signs
in is, by a page and not by a token; where that entry can't be written, they are signed in all the same.
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
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError, transaction
from django.db.models import Model
from django.db.models.signals import pre_save
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from accounts.allauth_private import client_address
from accounts.models import AuditEntry, AuthToken, NotificationAddress, Owner, PulseUser
from core import locks
from rabbit.management import BrokerError, was_not_executed

logger = logging.getLogger(__name__)

CREATED, CHANGED, DELETED = "made", "changed", "deleted"
_DEEDS = {AuditEntry.Action.CREATE: CREATED, AuditEntry.Action.UPDATE: CHANGED, AuditEntry.Action.DELETE: DELETED}

MAX_REASON_LENGTH = 300

_request: ContextVar[HttpRequest | None] = ContextVar("audit_request", default=None)


class Middleware:
    """Keep the request at hand while it is answered: an entry written meanwhile says who sent it, and from where.

    Nothing is looked up before there is an entry. auditlog's own middleware looks the visitor up at each request,
    doesn't know of tokens, and believes what a client says its address is.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer the request."""
        before = _request.set(request)
        try:
            return self.get_response(request)
        finally:
            _request.reset(before)


def actor() -> Owner | None:
    """Return who sent the request that is being answered; None: nobody who is signed in, or there is no request."""
    request = _request.get()
    user = getattr(request, "user", None)
    # REST framework puts the owner of a token there, too, as soon as it has looked at it.
    return user if isinstance(user, Owner) and user.is_authenticated else None


def watch(model: type[Model], fields: Collection[str], many_to_many: Collection[str] = ()) -> None:
    """Write an entry whenever a row of this model is made, is saved with a change to these fields, or is deleted.

    Each entry costs one statement, and each save of a row that was there one more. So no model is watched whose rows
    are written by the hundred, or by agents.
    """
    auditlog.register(model, include_fields=list(fields), m2m_fields=set(many_to_many))


def is_watched(model: type[Model]) -> bool:
    """Return whether changes to rows of this model are written by themselves."""
    return bool(auditlog.contains(model))


def note(by: Owner | None, action: str, thing: Model | Sequence[Model] | None, **details: Any) -> None:
    """Write that something was done, in words such as "purged"; ``by`` None: by whoever sent the request, or nobody.

    Several things of a model, at least one, share an entry. ``details`` are what else is to be known: text, numbers, or
    lists and mappings of these, and never a secret.
    """
    _entry(by, action, thing, details).save()


class Change(NamedTuple):
    """A row of which fields were changed, with their values before and after."""

    thing: Model
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def record_changes(by: Owner | None, changes: Iterable[Change]) -> None:
    """Write which fields of each row were changed, from what to what, where they aren't watched: in one statement."""
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
    """Write what is about to be asked of the broker, and afterwards what became of it.

    Its outcome is unknown until then, and stays so where no answer comes, or this process is killed. Whoever lost the
    hold of an account didn't ask.
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
    entry = AuditEntry(deed=action, action=AuditEntry.Action.ACCESS, actor=by, additional_data=details, cid=get_cid())
    things = [thing] if isinstance(thing, Model) else thing or []
    if things:
        entry.content_type = ContentType.objects.get_for_model(things[0])
        entry.object_repr = ", ".join(str(one) for one in things)
    if len(things) == 1:
        # A token's primary key is its digest.
        key = things[0].uuid if isinstance(things[0], AuthToken) else things[0].pk
        entry.object_pk, entry.object_id = str(key), key if isinstance(key, int) else None
    return entry


@receiver(pre_save, sender=AuditEntry)
def add_context(sender: type[AuditEntry], instance: AuditEntry, **_: Any) -> None:
    """Say in a new entry who it was, by what, and from where; auditlog's own lack all of that."""
    if not instance._state.adding:
        return
    request = _request.get()
    instance.actor = instance.actor or actor()
    instance.actor_email = instance.actor.email if instance.actor else ""
    instance.deed = instance.deed or _DEEDS[instance.action]
    instance.additional_data = {**_origin(request), **(instance.additional_data or {})}
    instance.remote_addr = _address(request) if request is not None else None


@receiver(pre_log, sender=Owner)
def should_log(sender: type[Owner], action: int, **_: Any) -> bool:
    """Leave out the rows of visitors who typed an address: whoever tries many must not fill the trail."""
    return action != AuditEntry.Action.CREATE or _request.get() is None or actor() is not None


@receiver(user_logged_in)
def record_sign_in(sender: Any, user: Owner, **_: Any) -> None:
    """Write that somebody signed in, which is worth no failure of it."""
    if _request.get() is None:
        return
    try:
        with transaction.atomic():
            note(user, "signed in", user)
    except DatabaseError:
        logger.exception("That %s signed in is not in the audit trail", user)


def _origin(request: HttpRequest | None) -> dict[str, str]:
    if request is not None:
        token = getattr(request, "auth", None)
        return {"token": str(token)} if isinstance(token, AuthToken) else {}
    if current_task:
        return {"task": current_task.name}
    if Path(sys.argv[0]).name == "manage.py" and len(sys.argv) > 1:
        return {"command": sys.argv[1]}
    return {}


def _address(request: HttpRequest) -> str | None:
    """Return where a request came from, as far as the proxies that are trusted say so; None: not known."""
    try:
        found = client_address(request)
    except (ImproperlyConfigured, PermissionDenied):  # fewer proxies than GUARDIAN_PROXIES says, or no address
        return None
    return found.partition("%")[0] or None  # no column takes the interface of a link-local address


watch(
    Owner,
    (
        "email", "full_name", "vouched", "is_staff", "is_superuser", "is_active", "time_zone", "quiet_from",
        "quiet_until", "weekly_summary",
    ),
)  # fmt: skip
watch(PulseUser, ("username", "warn_length", "max_length"), many_to_many=("owners",))
watch(NotificationAddress, ("email", "pulse_user", "confirmed_at"))
