"""Fixtures that several test modules use; conftest.py imports them. Functions are in toolbox.py."""

import pytest
from django.test import Client
from django.utils import timezone

from accounts.models import Owner, PulseUser


@pytest.fixture
def alice(db: None) -> Owner:
    """Give an owner who has signed in and may use the broker."""
    return Owner.objects.create_user("alice@example.org", vouched=True, last_login=timezone.now())


@pytest.fixture
def bob(db: None) -> Owner:
    """Give another owner who has signed in and may use the broker."""
    return Owner.objects.create_user("bob@example.org", vouched=True, last_login=timezone.now())


@pytest.fixture
def operator(db: None) -> Owner:
    return Owner.objects.create_superuser("ops@example.org")


@pytest.fixture
def admin(client: Client, operator: Owner) -> Client:
    """Give a client that the operator is signed in with."""
    client.force_login(operator)
    return client


@pytest.fixture
def account(alice: Owner) -> PulseUser:
    """Give Alice's Pulse user "alice"."""
    pulse_user = PulseUser.objects.create(username="alice", ready=True)
    pulse_user.owners.add(alice)
    return pulse_user
