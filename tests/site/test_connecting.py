"""The section "Connect" of the pages: the broker's public address, and examples that run."""

import os
import subprocess
import sys
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.core.checks import run_checks

from accounts.pulse_users.creation import create_pulse_user
from core import connecting
from tests.support.toolbox import AWAY_AMQP

PASSWORD = "long-enough-1"


@pytest.fixture
def public(settings, broker):
    """Configure the public address of the broker, and return its host and port."""
    parts = urlsplit(broker.amqp_url)
    settings.GUARDIAN_PUBLIC_AMQP_URL = f"amqp://{parts.hostname}:{parts.port}"
    return parts.hostname, parts.port


@pytest.fixture
def new_pulse_user(guarded, alice, management):
    name = f"connects-{uuid4().hex[:8]}"
    create_pulse_user(name, [alice], PASSWORD, by=alice)
    yield name
    management.delete_user(name)


@pytest.fixture
def run_in_python(guarded, public):
    def run(name: str, queue: str, exchange: str = "") -> str:
        code = next(example.code for example in connecting.examples(name, guarded, queue, exchange))
        with subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            env={**os.environ, "RABBIT_PASSWORD": PASSWORD},
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            try:
                return program.stdout.readline().strip()
            finally:
                program.kill()

    return run


def test_the_example_of_a_new_pulse_user_publishes_a_message_and_consumes_it(run_in_python, new_pulse_user):
    assert (
        run_in_python(new_pulse_user, f"queue/{new_pulse_user}/example", f"exchange/{new_pulse_user}/example")
        == "Hello"
    )


def test_the_example_of_an_agent_consumes_its_queue(run_in_python, new_pulse_user, amqp):
    amqp.queue(f"queue/{new_pulse_user}/example", 1)
    assert run_in_python(new_pulse_user, f"queue/{new_pulse_user}/example")


def test_names_are_quoted_in_every_example(settings):
    settings.GUARDIAN_PUBLIC_AMQP_URL = "amqps://rabbit.example.org"
    for example in connecting.examples("alice", 'a"b\\c', "queue/alice/<x>", "exchange/alice/<y>"):
        assert r'"a\"b\\c"' in example.code, example.name
        assert '"queue/alice/<x>"' in example.code, example.name
        assert '"exchange/alice/<y>"' in example.code, example.name
        assert "5671" in example.code, example.name


def test_the_pulse_user_page_shows_the_public_address_and_never_the_internal_one(
    guarded, settings, pulse_user, as_alice
):
    settings.GUARDIAN_PUBLIC_AMQP_URL = "amqps://rabbit.example.org:5700"
    settings.RABBIT_URL = AWAY_AMQP
    page = as_alice.get("/pulse-users/alice/").text
    assert "rabbit.example.org" in page
    assert "5700" in page
    assert "127.0.0.1:1" not in page


def test_without_a_public_address_the_page_says_what_to_ask(guarded, pulse_user, as_alice):
    page = as_alice.get("/pulse-users/alice/").text
    assert "Ask an operator for the host" in page
    assert "import pika" not in page
    assert "RABBIT_PASSWORD" not in page


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GUARDIAN_PUBLIC_AMQP_URL", "http://rabbit.example.org"),
        ("GUARDIAN_PUBLIC_AMQP_URL", "amqp://guest:guest@rabbit.example.org"),
        ("GUARDIAN_PUBLIC_AMQP_URL", "amqp://rabbit.example.org/vhost"),
        ("GUARDIAN_PUBLIC_STOMP_URL", "amqp://rabbit.example.org"),
    ],
)
def test_a_wrong_public_address_fails_the_system_check(settings, name, value):
    setattr(settings, name, value)
    assert [error for error in run_checks() if name in error.msg]
    if not value.startswith(("amqp://guest", "amqp://rabbit.example.org/")):
        assert connecting.amqp_address() is None
