"""Locks of names on the broker: leases that outlast a request and are renewed before each."""

import contextlib
import uuid
from datetime import timedelta

import pytest
from django.db import InterfaceError, connection
from django.db.models.functions import Now
from django.utils import timezone

from core import locks
from core.leases import lease
from core.models import Lease

pytestmark = pytest.mark.sqlite


def test_a_lock_left_by_a_crash_expires_although_the_clock_was_set_back(db):
    locks.Lock("alice").acquire()
    with pytest.raises(locks.LockTaken):
        locks.Lock("alice").acquire()
    Lease.objects.update(expires_at=Now() + timedelta(hours=1))  # as the database's clock sees it after the change
    with locks.lock("alice"):
        pass


def test_a_lock_outlasts_any_request_and_belongs_to_its_holder(db, settings):
    settings.GUARDIAN_BROKER_TIMEOUT_SECONDS = 20.0
    assert locks.lock_seconds() > 2 * (2 + 3 * 20)
    with locks.lock("alice") as first:
        first.renew()
        Lease.objects.update(holder=uuid.uuid4())
        with pytest.raises(locks.LockTaken):
            first.renew()
    assert Lease.objects.filter(name=locks.lease_name("alice")).exists()
    with locks.lock("Alice"), pytest.raises(locks.LockTaken), locks.lock("alice"):
        pass
    assert locks.locked_names(["alice", "Alice", "bob"]) == ["alice"]


def test_a_released_lock_leaves_no_row(db):
    with locks.lock("alice"):
        assert locks.locked_names(["alice"]) == ["alice"]
    assert not Lease.objects.filter(name__contains="alice").exists()


@pytest.mark.django_db(transaction=True)
def test_what_is_released_without_the_database_ends_with_the_next_lease():
    def fail(*_):
        raise InterfaceError("connection already closed")

    with contextlib.ExitStack() as stack, lease("pass"), locks.lock("alice"):
        stack.enter_context(connection.execute_wrapper(fail))
    assert locks.locked_names(["alice"]) == ["alice"]
    with locks.lock("bob"):
        assert locks.locked_names(["alice", "bob"]) == ["bob"]
    with lease("pass"):
        pass


def test_a_working_process_renews_its_lock(db, monkeypatch):
    monkeypatch.setattr(locks, "RENEW_INTERVAL_SECONDS", 0)
    with locks.lock("alice") as ours:
        Lease.objects.update(expires_at=Now() + timedelta(seconds=1))
        ours.renew()
        assert Lease.objects.filter(expires_at__gt=Now() + timedelta(seconds=locks.lock_seconds() - 5)).exists()


def test_an_expired_lock_is_lost(db):
    with locks.lock("alice") as ours:
        Lease.objects.update(expires_at=Now() - timedelta(seconds=1))
        with pytest.raises(locks.LockTaken):
            ours.renew()


def test_a_process_can_wait_for_a_lock(db, monkeypatch):
    with locks.lock("alice") as first:
        monkeypatch.setattr("core.locks.time.sleep", lambda _: first.release())
        with locks.lock("alice", wait=10), pytest.raises(locks.LockTaken):
            first.renew()


def test_waiting_for_a_lock_is_bounded(db):
    with locks.lock("alice"):
        for wait in (0, 0.3):
            began = timezone.now()
            with pytest.raises(locks.LockTaken), locks.lock("alice", wait=wait):
                raise AssertionError
            assert timedelta(seconds=wait) <= timezone.now() - began < timedelta(seconds=wait + 1)
