"""The clean-up of subscriptions whose owner has no valid token, and of expired tokens."""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from accounts.models import AuthToken, Owner
from agents.models import Consumer, EventSubscription, SubscriptionQueue, Sweep
from agents.removal import deletions, handlers
from agents.sweeps.reports import Report, apply_brake, batches, queue_as_json, run
from core.leases import HeldLease
from rabbit.names import QueueName


def clean_up_stale(*, force: bool = False, dry_run: bool = False, only: Collection[str] | None = None) -> Report:
    """Remove the subscriptions and consumers of owners without a valid token, and expired tokens.

    Identities stay. Queues and logins are removed from the broker as in any other removal. ``force`` ignores the
    brake. ``dry_run`` changes nothing. ``only`` are the confirmed subscriptions and consumers, by their UUIDs in hex;
    no others are removed. Expired tokens are removed in any case. If another process runs a clean-up, the report says
    so.
    """
    confirmed = None if only is None else frozenset(only)
    return run(Report(Sweep.Kind.STALE.value, timezone.now(), dry_run), partial(_clean_up, only=confirmed), force)


def _clean_up(report: Report, lease: HeldLease | None, force: bool, *, only: Collection[str] | None) -> None:
    """Clean up under this lease. Without a lease, only report what would be done."""
    owners = list(_stale_owners().values_list("email", flat=True))
    subscribed = SubscriptionQueue.objects.filter(subscription__owner__in=_stale_owners())
    consuming = Consumer.objects.filter(identity__owner__in=_stale_owners())
    queues: list[tuple[QueueName, str]] = [
        ((vhost, name), uuid.hex)
        for vhost, name, uuid in chain(
            subscribed.values_list("vhost", "queue_name", "subscription__uuid"),
            consuming.values_list("vhost", "queue_name", "uuid"),
        )
    ]
    stale = {
        uuid.hex: owner
        for uuid, owner in chain(
            EventSubscription.objects.filter(owner__in=_stale_owners()).values_list("uuid", "owner"),
            consuming.values_list("uuid", "identity__owner"),
        )
        if only is None or uuid.hex in only
    }
    names = sorted(name for name, uuid in queues if uuid in stale)
    report.left_out = (
        [queue_as_json(name) for name, uuid in sorted(queues) if uuid not in stale] if only is not None else []
    )
    report.seen = SubscriptionQueue.objects.count() + Consumer.objects.count()
    report.found = len(names)
    report.owners = sorted(owners)
    report.stale = sorted(stale)
    apply_brake(report, force)
    expired = AuthToken.objects.filter(handlers.is_expired())
    if lease is None or report.brake_held:
        report.would_delete = [queue_as_json(name) for name in names]
    if lease is None:
        report.subscriptions = len(stale)
        report.tokens = expired.count()
        return
    if not report.brake_held:
        for batch in batches(sorted(stale.items(), key=itemgetter(1))):
            _remove_subscriptions(report, dict(batch), lease)
    for batch in batches(list(expired.order_by("pk").values_list("pk", flat=True))):
        with transaction.atomic():
            lease.renew()
            gone = AuthToken.objects.filter(handlers.is_expired(), pk__in=batch).delete()[1]
            report.tokens += gone.get(AuthToken._meta.label, 0)


def _owners_without_token() -> QuerySet[Owner]:
    valid = AuthToken.objects.filter(user=OuterRef("pk")).exclude(handlers.is_expired())
    return Owner.objects.filter(~Exists(valid))


def _stale_owners() -> QuerySet[Owner]:
    """Return the owners without a valid token who have subscriptions or consumers."""
    subscribed = EventSubscription.objects.filter(owner=OuterRef("pk"))
    consuming = Consumer.objects.filter(identity__owner=OuterRef("pk"))
    return _owners_without_token().filter(Exists(subscribed) | Exists(consuming))


def _remove_subscriptions(report: Report, these: Mapping[str, int], lease: HeldLease) -> None:
    """Remove these subscriptions and consumers, given as UUIDs with their owners, unless the owner has a token now."""
    gone: Counter[str] = Counter()
    with transaction.atomic():
        lease.renew()
        # Creating a token locks its owner, too. The tokens are read in a second statement: on PostgreSQL, a statement
        # that waits for a lock doesn't see rows that were inserted while it waited.
        locked = list(
            Owner.objects.select_for_update(no_key=True)
            .filter(pk__in=set(these.values()))
            .order_by("pk")
            .values_list("pk", flat=True)
        )
        stale = list(_owners_without_token().filter(pk__in=locked).values_list("pk", flat=True))
        gone.update(deletions.delete(EventSubscription.objects.filter(uuid__in=these, owner__in=stale)))
        gone.update(deletions.delete(Consumer.objects.filter(uuid__in=these, identity__owner__in=stale)))
    report.subscriptions += gone[EventSubscription._meta.label] + gone[Consumer._meta.label]
    report.deleted += gone[SubscriptionQueue._meta.label] + gone[Consumer._meta.label]
