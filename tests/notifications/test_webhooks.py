"""What programs get of a notification: signed fields, and incidents that end. Over real HTTPS."""

import json
import re
from typing import Any

import jsonschema
import pytest
from apprise.plugins import opsgenie, pagerduty
from django.utils import timezone

from guardian_site.help_pages import DOCS
from notifications import channels, sending
from notifications.channels import SIGNATURE, create_channel
from notifications.enqueue import Notice, enqueue
from notifications.models import Channel
from queues.mails import kinds
from queues.mails.subject import subject_key
from tests.notifications.test_mails import FACTS
from tests.support.api import Program
from tests.support.toolbox import stored_queue

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("private_channels", "mailbox")]

SCHEMA = json.loads((DOCS / "examples" / "webhook.schema.json").read_text())
EXAMPLE, PROGRAM = re.findall(r"^```\w+\n(.*?)^```$", (DOCS / "webhooks.md").read_text(), re.MULTILINE | re.DOTALL)
DELETION = {"archived": 8001, "dropped": 0, "held": 0, "archived_until": "2026-01-12T00:00:00"}


@pytest.fixture
def queue(pulse_user):
    return stored_queue("queue/alice/builds", pulse_user=pulse_user, state="warned", ready=1, unacknowledged=0)


@pytest.fixture
def notify(queue):
    def notify(kind, **facts):
        about = (subject_key(queue.pk), queue.pulse_user_id)
        enqueue([Notice(kind, {**FACTS, **facts}, *about)], timezone.now())
        sending.send_due()

    return notify


def test_a_webhook_gets_the_documented_fields(alice, webhook, notify, queue, settings):
    create_channel(alice, "program", webhook.url())
    notify(kinds.WARNING)
    [request] = webhook.received
    jsonschema.validate(request.json, SCHEMA)
    jsonschema.validate(json.loads(EXAMPLE), SCHEMA)
    assert json.loads(EXAMPLE).keys() == request.json.keys()
    got = {name: request.json[name] for name in SCHEMA["required"] if name not in ("at", "message")}
    assert got == {
        "event": "warning", "severity": "warning", "queue": "queue/alice/builds", "vhost": "/",
        "owner": "alice@example.org", "length": 2104, "limit": 8000, "seconds_left": 1684, "diagnosis": None,
        "url": f"{settings.GUARDIAN_BASE_URL}/queues/{queue.uuid}/",
        "title": "[Guardian] Warning: queue/alice/builds has 2,104 messages",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "facts", "severity", "colour"),
    [
        (kinds.WARNING, {}, "warning", "warning"),
        (kinds.REMINDER, {}, "warning", "warning"),
        (kinds.RECOVERY, {"state": "ok"}, "normal", "success"),
        (kinds.SUMMARY, {}, "warning", "warning"),
        (kinds.SUMMARY, {"state": "ok"}, "normal", "success"),
        (kinds.DELETION, DELETION, "critical", "failure"),
        (kinds.NO_CONSUMERS, {"state": "ok"}, "warning", "warning"),
        (kinds.CONSUMERS_BACK, {}, "normal", "success"),
        (kinds.STALLED, {"state": "ok"}, "warning", "warning"),
        (kinds.STALL_OVER, {}, "normal", "success"),
    ],
)
def test_each_event_has_its_severity(alice, webhook, notify, kind, facts, severity, colour):
    create_channel(alice, "program", webhook.url())
    notify(kind, **facts)
    [request] = webhook.received
    jsonschema.validate(request.json, SCHEMA)
    assert (request.json["event"], request.json["severity"], request.json["type"]) == (kind, severity, colour)


def test_a_test_message_has_the_documented_fields(alice, webhook):
    channels.test_channel(create_channel(alice, "program", webhook.url()))
    [request] = webhook.received
    jsonschema.validate(request.json, SCHEMA)
    assert (request.json["event"], request.json["severity"]) == ("test", "info")


def test_a_webhook_is_signed_with_a_secret_that_is_shown_once(alice, webhook, notify):
    made = Program(alice).post("channels/", {"name": "program", "url": webhook.url()})
    assert made["Cache-Control"] == "no-store"
    secret = made.json()["secret"]
    notify(kinds.WARNING)
    [request] = webhook.received
    documented: dict[str, Any] = {}
    exec(PROGRAM, documented)
    assert documented["is_from_guardian"](secret, request.body, request.headers[SIGNATURE])
    assert not documented["is_from_guardian"](secret, request.body + b" ", request.headers[SIGNATURE])
    assert "secret" not in Program(alice).get(f"channels/{made.json()['uuid']}/").json()
    assert secret not in str(Channel.objects.values().get())


def test_the_page_shows_the_secret_of_a_webhook_once(as_alice, webhook):
    page = as_alice.post("/settings/", {"channel": "add", "name": "program", "url": webhook.url()})
    secret = channels.secret_of(Channel.objects.get())
    assert (page.status_code, page["Cache-Control"]) == (201, "no-store")
    assert secret in page.text
    assert secret not in as_alice.get("/settings/").text


def test_a_chat_and_a_webhook_from_before_secrets_are_not_signed(alice, webhook, notify):
    create_channel(alice, "chat", f"mmosts://localhost:{webhook.port}/abcdefghijklmnopqrstuvwxyz")
    create_channel(alice, "program", webhook.url())
    Channel.objects.update(sealed_secret="")
    notify(kinds.WARNING)
    assert [SIGNATURE in request.headers for request in webhook.received] == [False, False]


def test_pagerduty_opens_an_incident_and_resolves_it(alice, webhook, notify, queue, settings, monkeypatch):
    monkeypatch.setitem(pagerduty.PAGERDUTY_API_LOOKUP, "us", webhook.url("/v2/enqueue"))
    create_channel(alice, "on call", "pagerduty://0123456789abcdef@key")
    notify(kinds.WARNING)
    notify(kinds.RECOVERY, state="ok")
    notify(kinds.DELETION, **DELETION)
    sent = [request.json for request in webhook.received]
    assert [one["event_action"] for one in sent] == ["trigger", "resolve", "trigger"]
    assert len({one["dedup_key"] for one in sent}) == 1
    assert [sent[0]["payload"]["severity"], sent[2]["payload"]["severity"]] == ["warning", "critical"]
    assert sent[0]["routing_key"] == "0123456789abcdef"
    assert sent[0]["links"] == [{"href": f"{settings.GUARDIAN_BASE_URL}/queues/{queue.uuid}/"}]


def test_opsgenie_opens_an_alert_and_closes_it(alice, webhook, notify, monkeypatch):
    for lookup in (opsgenie.OPSGENIE_API_LOOKUP, channels.OPSGENIE_API_LOOKUP):
        monkeypatch.setitem(lookup, "us", webhook.url("/v2/alerts"))
    webhook.status, webhook.body = 202, b'{"result": "Request will be processed", "requestId": "43a2"}'
    create_channel(alice, "on call", "opsgenie://0123456789abcdef/@alice/#team")
    notify(kinds.WARNING)
    notify(kinds.RECOVERY, state="ok")
    opened, closed = webhook.received
    assert (opened.path, opened.json["priority"], len(opened.json["responders"])) == ("/v2/alerts", "P3", 2)
    assert closed.path == f"/v2/alerts/{opened.json['alias']}/close?identifierType=alias"
    assert closed.headers["Authorization"] == opened.headers["Authorization"] == "GenieKey 0123456789abcdef"


def test_an_opsgenie_that_refuses_to_close_an_alert_is_tried_again(alice, webhook, notify, monkeypatch):
    monkeypatch.setitem(channels.OPSGENIE_API_LOOKUP, "us", webhook.url("/v2/alerts"))
    channel = create_channel(alice, "on call", "opsgenie://0123456789abcdef")
    webhook.status = 503
    notify(kinds.RECOVERY, state="ok")
    channel.refresh_from_db()
    assert "it answered 503" in channel.last_error
