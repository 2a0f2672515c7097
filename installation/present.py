"""The present installation, in a number of statements that does not depend on its size."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from django.db.models import Model, Q

from accounts.access.vouching import has_signed_in
from accounts.importing.adoption import PulseUserLists
from accounts.models import NotificationAddress, Owner, PulseUser, comparable, normalize_address
from agents.models import Offering
from installation.models import Created
from installation.resources import Key, Kind, Present, State, Wanted
from message_store.models import Application
from message_store.store import store
from queues.models import Queue
from queues.rules.temporary_limits import with_old_limits

_HAS_LIMITS = (
    Q(warn_length__isnull=False) | Q(max_length__isnull=False) | Q(unbounded=True) | Q(limits_until__isnull=False)
)


def read(wanted: Sequence[Wanted] = (), *, prune: bool = False) -> State:
    """Return the present resources: all with values of their own, and those that are wanted.

    If Pulse users are to be created, this lists the users of the broker, with one request. With ``prune``, it asks the
    message store for queues of the applications that the file no longer has.
    """
    created: dict[str, dict[int, Any]] = defaultdict(dict)
    for kind, pk, what in Created.objects.values_list("kind", "object_id", "what"):
        created[kind][pk] = what
    present = [*_owners(), *_applications(), *_offerings(), *_queues(wanted, created["queue"]), *_pulse_users()]
    resources = {(one.kind, one.key): one for one in present}
    here = {
        key: created[kind][one.pk] == (one.values if one.kind is Kind.QUEUE else list(one.key))
        for key, one in resources.items()
        if one.pk in created[kind := one.kind.name.lower()]
    }
    pruned = here.keys() - {(one.kind, one.key) for one in wanted} if prune else ()
    with_queues = {key[0] for kind, key in pruned if kind is Kind.APPLICATION and store().queues(key[0], limit=1)}
    stored = {key[0] for kind, key in resources if kind is Kind.PULSE_USER}
    new = {one.name for one in wanted if one.kind is Kind.PULSE_USER and one.name not in stored}
    return State(resources, here, with_queues, _broker_users(new) if new else {})


def _broker_users(names: Collection[str]) -> dict[str, str]:
    lists = PulseUserLists.fetch()
    return {name: lists.why_not_adoptable(name) for name in names if name in lists.tags}


def _owners() -> Iterator[Present]:
    owners = Owner.objects.annotate(is_listed=has_signed_in() | Q(vouched=True))
    for pk, email, vouched, is_staff, is_active, is_listed in owners.values_list(
        "pk", "email", "vouched", "is_staff", "is_active", "is_listed"
    ):
        values = {"access": vouched or is_staff, "operator": is_staff}
        obstacle = "" if is_active else "This owner is deactivated. Activate the owner in the administration first."
        yield Present(Kind.OWNER, (comparable(email),), pk, values, is_whole=is_listed, obstacle=obstacle)


def _applications() -> Iterator[Present]:
    for pk, name in Application.objects.values_list("pk", "name"):
        yield Present(Kind.APPLICATION, (name,), pk, {})


def _offerings() -> Iterator[Present]:
    members, publishers = _people(Offering.members.through), _people(Offering.publishers.through)
    for pk, key, name in Offering.objects.values_list("pk", "uuid", "name"):
        yield Present(
            Kind.OFFERING, (key.hex,), pk, {"name": name, "members": members[pk], "publishers": publishers[pk]}
        )


def _pulse_users() -> Iterator[Present]:
    owners, emails = _people(PulseUser.owners.through), defaultdict(list)
    for pk, email in NotificationAddress.objects.values_list("pulse_user", "email"):
        if (address := normalize_address(email)) not in owners[pk]:  # an owner gets all notifications anyway
            emails[pk].append(address)
    for row in PulseUser.objects.all():
        values = {
            "owners": owners[row.pk],
            "warn_length": row.warn_length,
            "max_length": row.max_length,
            "keeps_archives": row.keeps_archives,
            "hold_off_minutes": row.hold_off_minutes,
            "notification_emails": sorted(emails[row.pk]),
        }
        obstacle = "" if row.removing_since is None else "It is being removed. Wait until it is gone."
        yield Present(Kind.PULSE_USER, (row.username,), row.pk, values, is_whole=row.ready, obstacle=obstacle)


def _queues(wanted: Sequence[Wanted], created: Collection[int]) -> Iterator[Present]:
    """Yield the queues with limits of their own and those that the file names, or all if it has patterns."""
    these = [one for one in wanted if one.kind is Kind.QUEUE]
    rows = Queue.objects.order_by()
    if not any(one.pattern for one in these):
        rows = rows.filter(_HAS_LIMITS | Q(name__in=[one.name for one in these]) | Q(pk__in=created))
    columns = ("vhost", "name", "state", "registered", "unbounded", "warn_length", "max_length", "limits_before")
    for row in rows.only(*columns):
        obstacle = "An agent registered this queue. Set its limits on its page." if row.registered else ""
        lasting = with_old_limits(row)
        values = {name: getattr(lasting, name) for name in ("warn_length", "max_length", "unbounded")}
        key: Key = (row.vhost, row.name)
        is_listed = row.state != Queue.State.GONE
        yield Present(Kind.QUEUE, key, row.pk, values, is_whole=is_listed, obstacle=obstacle)


def _people(through: type[Model]) -> dict[int, list[str]]:
    """Return the addresses of the active owners in a relation, sorted, by the primary key of its other end."""
    found: dict[int, Any] = defaultdict(list)
    [other] = [field.name for field in through._meta.fields if field.is_relation and field.name != "owner"]
    active = through._default_manager.filter(owner__is_active=True).order_by("owner__email")
    for pk, email in active.values_list(other, "owner__email"):
        found[pk].append(comparable(email))
    return defaultdict(list, {pk: sorted(emails) for pk, emails in found.items()})
