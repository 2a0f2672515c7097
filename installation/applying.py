"""Carry out a plan, by the functions that pages use.

Each change is complete in itself, so after a kill or a failure the next run plans and carries out the rest. Threads
carry them out, so that the lease is renewed during a long one. Pulse users are changed by several: creating one is
mostly waiting for the broker.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, ValidationError
from django.db import connection, transaction

from accounts import audit, queue_effects
from accounts.access import vouching
from accounts.importing import adoption
from accounts.models import UNCHANGED, Owner, PulseUser, owner_with_address, owners_by_address
from accounts.pulse_users import addresses, creation, ownership, removal, thresholds
from accounts.signing_in.owners import mark_address_verified
from agents.models import Offering
from agents.offerings import save_offering
from agents.removal import deletions
from core.confirmation import ConfirmableChange, ConfirmationRequired, Effect
from core.each import describe_error
from core.leases import HeldLease, LeaseLost, LeaseTaken
from core.locks import LockTaken
from installation import consequences
from installation.models import Created, recording_creations
from installation.planning import Change, Do, Plan
from installation.resources import Kind
from message_store import applications
from message_store.models import Application
from message_store.store import StoreUnavailable
from queues.actions import single, unbounded
from queues.models import Queue
from queues.rules.temporary_limits import limits_of, with_old_limits
from rabbit.errors import BrokerError, BrokerUnavailable
from rabbit.names import user_of_queue
from rabbit.threads import ContextThreadPool

THREADS = 4
BATCH = 10
"""Pulse users that a thread changes with one connection to the database."""

RENEW_SECONDS = 10.0
"""The longest wait for threads between two looks at the lease."""

EXPECTED = (
    ValidationError, PermissionDenied, ObjectDoesNotExist, BrokerError, ConfirmationRequired, LockTaken, LeaseTaken,
    LeaseLost, StoreUnavailable, OSError,
)  # fmt: skip
"""Errors of a change after which the other changes are carried out."""


class Failure(NamedTuple):
    """A change that failed, and why."""

    change: Change
    why: str


class Applier:
    """Carries out the changes of a plan.

    ``source`` names the file and its revision. ``effect`` are the queues that the operator confirmed. ``passwords`` is
    the folder for the passwords of new Pulse users, or None: their owners set passwords on their pages.
    """

    def __init__(self, source: str, effect: Effect, passwords: Path | None = None) -> None:
        self._source = source
        self._confirmed = frozenset(effect.keys)
        self._passwords = passwords
        self._is_stopped = False

    def carry_out(self, plan: Plan, lease: HeldLease) -> Iterator[Failure | None]:
        """Yield a failure or None after each change. After the broker became unreachable, all others fail.

        Raises:
            LeaseLost: this process was suspended, and another one may be applying a file.
        """
        by = audit.by_command(f"apply, from {self._source}")
        with by, recording_creations(), ContextThreadPool(THREADS) as pool:
            try:
                for is_of_pulse_users, group in groupby(plan.changes, lambda one: one.kind is Kind.PULSE_USER):
                    changes, size = list(group), BATCH if is_of_pulse_users else 1
                    batches = [changes[start : start + size] for start in range(0, len(changes), size)]
                    for at_once in [batches] if is_of_pulse_users else [[batch] for batch in batches]:
                        lease.renew()
                        waiting = {pool.submit(self._try_each, batch) for batch in at_once}
                        while waiting:
                            done, waiting = wait(waiting, timeout=RENEW_SECONDS, return_when=FIRST_COMPLETED)
                            lease.renew_if_due()
                            yield from (result for call in done for result in call.result())
            finally:
                self._is_stopped = True  # for what waits in the pool

    def _try_each(self, changes: Sequence[Change]) -> list[Failure | None]:
        try:
            return [self._try(change) for change in changes]
        finally:
            connection.close()

    def _try(self, change: Change) -> Failure | None:
        if self._is_stopped:
            return Failure(change, "not tried, because the broker does not answer")
        try:
            self._carry_out(change)
        except removal.RemovalPending:
            return None  # Guardian continues
        except EXPECTED as error:
            self._is_stopped = self._is_stopped or isinstance(error, BrokerUnavailable)
            return Failure(change, describe_error(error))
        return None

    def _carry_out(self, change: Change) -> None:
        match change.kind:
            case Kind.OWNER:
                self._owner(change)
            case Kind.APPLICATION:
                _application(change)
            case Kind.OFFERING:
                self._offering(change)
            case Kind.QUEUE:
                self._queue(change)
            case Kind.PULSE_USER:
                self._pulse_user(change)

    def _confirming(self, do: Callable[[str], object]) -> None:
        """Call ``do`` with the confirmation that it asks for, if the operator confirmed the queues it deletes."""
        try:
            do("")
        except ConfirmationRequired as question:
            if not self._confirmed.issuperset(question.effect.keys):
                raise
            do(question.confirm)

    def _delete(self, change: Change, row: Owner | Offering) -> None:
        def delete(confirm: str) -> None:
            deletion = ConfirmableChange(None, "delete", [row], {}, confirm)
            deletion.require_confirmed(consequences.of_removed(change.kind, [row.pk]))
            deletions.delete(row)

        self._confirming(delete)

    def _owner(self, change: Change) -> None:
        reason = f"By apply, from {self._source}"[: vouching.MAX_REASON_LENGTH]
        with transaction.atomic():
            owner = owner_with_address(change.name)
            if change.do is Do.REMOVE:
                if owner is not None and owner.pk == change.pk:
                    deletions.require_no_pulse_users(owner)
                    self._delete(change, owner)
                return
            if owner is None:
                owner = Owner.objects.create_user(change.name)
                Created.record(Kind.OWNER, owner, change.key)
            if "operator" in change.new:
                owner.is_staff = owner.is_superuser = change.new["operator"]
                owner.save(update_fields=["is_staff", "is_superuser"])
            if change.do is Do.CREATE:
                mark_address_verified(owner)
            stops_operating = change.new.get("operator") is False
            if change.new.get("access", stops_operating):  # which they had as an operator
                vouching.vouch(owner, None, reason)
            elif "access" in change.new:
                vouching.unvouch(owner, None, reason)

    def _offering(self, change: Change) -> None:
        if change.do is Do.REMOVE:
            if (found := Offering.objects.filter(pk=change.pk).first()) is not None:
                self._delete(change, found)
            return
        people = {field: _owners(change.new[field]) for field in ("members", "publishers") if field in change.new}
        with transaction.atomic():
            key = uuid.UUID(change.key[0]) if change.key[0] else uuid.uuid4()
            is_new = not Offering.objects.filter(uuid=key).exists()
            offering = save_offering(key, change.new.get("name", change.name), **people, replace=True)
            if is_new:
                Created.record(Kind.OFFERING, offering, (key.hex,))

    def _queue(self, change: Change) -> None:
        if change.pk:
            self._confirming(partial(_set_limits, change))
        else:
            unbounded.between_passes(partial(_set_limits, change))

    def _pulse_user(self, change: Change) -> None:
        new = dict(change.new)
        owners = _owners(new.pop("owners", []))
        match change.do:
            case Do.CREATE:
                try:
                    creation.create_pulse_user(change.name, owners, on_password=partial(self._keep, change.name))
                except Exception:
                    if self._passwords is not None:  # the folder was empty, so the file is of this run
                        (self._passwords / change.name).unlink(missing_ok=True)
                    raise
            case Do.ADOPT:
                emails = tuple(change.new["owners"])
                adoption.adopt([adoption.Step("account", change.name, adoption.ADOPT, emails)], notify=True)
        is_new = change.do in (Do.CREATE, Do.ADOPT)
        pulse_user = PulseUser.objects.get(**({"username": change.name} if is_new else {"pk": change.pk}))
        if change.do is Do.REMOVE:
            self._confirming(partial(_remove, pulse_user))
            return
        if change.do is Do.CHANGE and owners:
            inactive = pulse_user.owners.filter(is_active=False)
            ownership.set_owners(pulse_user, [*owners, *inactive], None)
        if "warn_length" in new or "max_length" in new:
            warn, limit = new.get("warn_length", UNCHANGED), new.get("max_length", UNCHANGED)
            self._confirming(partial(thresholds.set_thresholds, pulse_user, warn, limit, None))
        if options := {name: new[name] for name in ("keeps_archives", "hold_off_minutes") if name in new}:
            thresholds.set_options(pulse_user, **options)
        if "notification_emails" in new:
            addresses.set_addresses(pulse_user, new["notification_emails"], None)

    def _keep(self, username: str, password: str) -> None:
        """Write the password of a new Pulse user to a file that only this account can read."""
        if self._passwords is not None:
            path = self._passwords / username
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{password}\n")


def _owners(emails: Sequence[str]) -> list[Owner]:
    """Return the active owners with these addresses. Raises Owner.DoesNotExist if there is none for one of them."""
    found = owners_by_address(emails, Owner.objects.filter(is_active=True)) if emails else {}
    if missing := [email for email in emails if email not in found]:
        raise Owner.DoesNotExist(f"There is no owner {missing[0]}.")
    return [found[email] for email in emails]


def _application(change: Change) -> None:
    with transaction.atomic():
        found = Application.objects.filter(name=change.name).first()
        if change.do is not Do.REMOVE:
            application = applications.create_application(change.name)
            if found is None:
                Created.record(Kind.APPLICATION, application, change.key)
        elif found is not None and found.pk == change.pk:
            applications.delete_application(found)


def _set_limits(change: Change, confirm: str = "") -> None:
    vhost, name = change.key
    with transaction.atomic():
        row = Queue.objects.filter(vhost=vhost, name=name).select_related("pulse_user").first()
        if row is None:
            [row] = unbounded.unlisted_rows([(vhost, name)])
        if row.pulse_user is None and vhost == settings.GUARDIAN_PULSE_VHOST and not row.registered:
            # The limits are checked with the thresholds of its Pulse user. The next pass would set it, too.
            pulse_user = PulseUser.objects.filter(username=user_of_queue(name) or "").first()
            Queue.objects.filter(pk=row.pk).update(pulse_user=pulse_user)
        before = limits_of(with_old_limits(row))
        limits: dict[str, Any] = {**before, **change.new}
        single.set_limits(row, None, confirm=confirm, **limits)
        record = Created.objects.filter(kind="queue", object_id=row.pk)
        if not any(limits.values()):
            record.delete()
        elif not any(before.values()) or before in record.values_list("what", flat=True):
            Created.record(Kind.QUEUE, row, limits)


def _remove(pulse_user: PulseUser, confirm: str) -> None:
    removal.remove_pulse_user(pulse_user, queue_effects.removal_of([pulse_user], None, confirm), None)
