"""Marked secrets are used in every way, with success and failure; then all output and storage is searched for them."""

import base64
import io
import json
import logging
import re
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client

from accounts.models import AuditEntry, Owner
from accounts.signing_in.links import create_link
from agents.models import Offering
from guardian_site.logs import JSONLinesFormatter, LineFormatter
from message_store import applications
from notifications import sending
from notifications.models import Channel, Notification
from queues.guard import once
from rabbit.errors import NotOnBroker
from tests.support.plugin import VAR

pytestmark = pytest.mark.slow

CODE = re.compile(r"^[B-Z]{4}-[B-Z]{4}$", re.MULTILINE)
NOBODY = "127.0.0.1:1"


class Search:
    """The planted secrets and the collected texts, each with the secrets that it may contain."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self.texts: list[tuple[str, str, tuple[str, ...]]] = []

    def plant(self, what: str, secret: str | None = None) -> str:
        """Store a secret (a new one by default) and return it."""
        self.secrets[what] = secret or f"s3cr3t-{uuid.uuid4().hex}"
        return self.secrets[what]

    def collect(self, where: str, text: str, *belonging: str) -> None:
        self.texts.append((where, text, belonging))

    def found(self) -> set[tuple[str, str]]:
        """Return (secret, place) for each secret in a text that may not contain it."""
        return {
            (what, where)
            for where, text, belonging in self.texts
            for what, secret in self.secrets.items()
            if secret in text and what not in belonging
        }


@pytest.fixture
def search(settings):
    """Give a search with the secrets of the settings planted."""
    search = Search()
    settings.SECRET_KEY = search.plant("SECRET_KEY")
    settings.SENTRY_DSN = f"https://{search.plant('SENTRY_DSN')}@sentry.example.org/1"
    settings.GUARDIAN_METRICS_TOKEN = search.plant("GUARDIAN_METRICS_TOKEN")
    settings.OIDC_CLIENT_SECRET = search.plant("OIDC_CLIENT_SECRET")
    return search


@pytest.fixture
def log():
    """Log everything at DEBUG in both formats, and give a function that returns the log."""
    written = io.StringIO()
    root, level = logging.getLogger(), logging.getLogger().level
    handlers = [logging.StreamHandler(written) for _ in (LineFormatter, JSONLinesFormatter)]
    for handler, form in zip(handlers, (LineFormatter, JSONLinesFormatter), strict=True):
        handler.setFormatter(form())
        root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written.getvalue
    root.setLevel(level)
    for handler in handlers:
        root.removeHandler(handler)


@pytest.fixture
def ask(search):
    """Return a function that sends a request, collects the answer's text, and returns the answer."""

    def ask(client, method, path, body=None, *, shows=(), status=None, form=False, **headers):
        kind = "application/x-www-form-urlencoded" if form else "application/json"
        data = json.dumps(body) if not form else "&".join(f"{name}={value}" for name, value in (body or {}).items())
        answer = client.generic(method, path, data if body is not None else "", kind, headers=headers)
        text = f"{answer.status_code} {dict(answer.headers)} {answer.content.decode()}"
        search.collect(f"{method} {path.partition('s3cr3t')[0]}: {answer.status_code}", text, *shows)
        assert status is None or answer.status_code == status, text
        return answer

    return ask


def texts_of_database():
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')
            rows = [[bytes(one) if isinstance(one, memoryview) else one for one in row] for row in cursor.fetchall()]
            yield f"the table {table}", f"{rows}"


def texts_of_files():
    """Yield each file that Guardian wrote, with Celery's messages decoded.

    Another process reads them: a process that closes SQLite's file loses all its locks on it while its connections
    are open, and the next process to exit deletes the write-ahead log. https://www.sqlite.org/howtocorrupt.html, 2.2.
    """
    for file in (file for file in Path(VAR.name).rglob("*") if file.is_file()):
        text = subprocess.run(["cat", file], stdout=subprocess.PIPE, check=True).stdout.decode("latin-1")
        if file.suffix == ".msg":
            text += base64.b64decode(json.loads(text)["body"]).decode()
        yield f"the file {file.name}", text


def texts_of_mails(mails):
    """Yield each mail with the secrets that it may contain."""
    for mail in mails:
        belonging = ("the sign-in code",) if CODE.search(mail.text) else ("the link of the address",)
        text = f"{mail.message.items()} {mail.text} {mail.html}"
        yield f"a mail to {mail.recipients}: {mail.subject}", text, *belonging


def test_no_secret_leaks(
    guarded, agents, amqp, broker, management, mailbox, private_channels, webhook, search, log, ask, settings, capfd
):
    if (password := urlsplit(broker.management_url).password) != "guest":
        search.plant("the broker's password", password)
    visitor = Client()
    # Sign-in, with a wrong code first.
    ask(visitor, "POST", "/signin/", {"email": "alice@example.org"}, form=True, status=302)
    code = search.plant("the sign-in code", CODE.search(mailbox.to("alice@example.org")[-1].text).group())
    search.plant("the sign-in code as it is compared", code.replace("-", ""))
    ask(visitor, "POST", "/signin/code/", {"code": search.plant("a wrong code")[:30]}, form=True, status=200)
    ask(visitor, "POST", "/signin/code/", {"code": code}, form=True, shows=["the session"], status=302)
    search.plant("the session", visitor.cookies["sessionid"].value)
    alice = Owner.objects.get(email="alice@example.org")
    Owner.objects.filter(pk=alice.pk).update(vouched=True)
    operator = Owner.objects.create_superuser("operator@example.org")
    link = urlsplit(create_link(operator)).path
    search.plant("the sign-in link", link.rstrip("/").rpartition("/")[2])
    office = Client()
    ask(office, "GET", link, status=200)
    ask(office, "POST", link, {}, form=True, shows=["the operator's session"], status=302)
    search.plant("the operator's session", office.cookies["sessionid"].value)
    ask(Client(), "GET", link, status=410)
    # Tokens.
    made = ask(visitor, "POST", "/tokens/", {"name": "one", "days": 7}, form=True, shows=["a token"], status=201)
    search.plant("a token", re.search(r"\b[0-9a-f]{64}\b", made.text).group())
    made = ask(visitor, "POST", "/api/tokens/", {"name": "two", "scope": "all"}, shows=["the token"], status=201)
    program = Client(headers={"Authorization": f"Token {search.plant('the token', made.json()['token'])}"})
    ask(visitor, "GET", "/tokens/", status=200)
    # Pulse users on the broker.
    own, name = search.plant("a password of ones own"), f"marked-{uuid.uuid4().hex[:8]}"
    pulse_user = {"username": name, "password": own, "notification_emails": ["team@example.org"]}
    ask(program, "POST", "/api/pulse-users/", {**pulse_user, "username": "no/name"}, status=400)
    ask(
        program, "POST", "/api/pulse-users/", {**pulse_user, "password": search.plant("a bad password")[:7]}, status=400
    )
    ask(program, "POST", "/api/pulse-users/", pulse_user, status=201)
    try:
        path = f"/api/pulse-users/{name}/"
        made = ask(program, "POST", f"{path}rotate-password/", {}, shows=["a made password"], status=200)
        search.plant("a made password", made.json()["password"])
        another = {"password": search.plant("another password of ones own")}
        ask(program, "POST", f"{path}rotate-password/", another, status=200)
        page = f"/pulse-users/{name}/password/"
        ask(visitor, "POST", page, {"password": search.plant("a password on a page")}, form=True, status=200)
        sending.send_due()
        confirm = re.search(r"http://127\.0\.0\.1:8000(/addresses/(\S+)/)", mailbox.to("team@example.org")[0].text)
        search.plant("the link of the address", confirm[2])
        for method in ("GET", "POST"):
            ask(Client(), method, confirm[1], shows=["the link of the address"], status=200)
        # Channels.
        url = webhook.url(f"/hooks/{search.plant('a channel address')}?token={search.plant('a channel token')}")
        body, shows = {"name": "room", "url": url}, ("a webhook's secret",)
        made = ask(program, "POST", "/api/channels/", body, status=201, shows=shows)
        search.plant(*shows, made.json()["secret"])
        of_channel = f"/api/channels/{made.json()['uuid']}/"
        ask(program, "POST", f"{of_channel}test/", status=204)
        refused = f"slack://{search.plant('a bad channel address')}"
        ask(program, "POST", "/api/channels/", {"name": "x", "url": refused}, status=400)
        ask(visitor, "GET", "/settings/", status=200)
        # Agents.
        offering = Offering.objects.create(name="Compute")
        offering.members.add(alice)
        offering.publishers.add(alice)
        config = f"password: {search.plant('an agent configuration')}"
        identity = {"offering": offering.uuid.hex, "name": "cellar", "config_file_content": config}
        shown = ["an agent configuration"]
        made = ask(program, "POST", "/api/agent-identities/", identity, shows=shown, status=201)
        of_agent = f"/api/agent-identities/{made.json()['uuid']}/"
        ask(program, "POST", f"{of_agent}register_queue/", {}, status=201)
        event = {"object_type": "order", "payload": {}}
        ask(program, "POST", f"/api/offerings/{offering.uuid.hex}/events/", event, status=200)
        ask(office, "GET", of_agent, status=200)
        # The message store.
        made = ask(
            office, "POST", "/admin/message_store/application/add/", {"name": "shop"}, form=True, shows=["a key"]
        )
        assert made.status_code == 201
        key = search.plant("a key", re.search(r"\b[0-9a-f]{64}\b", made.text).group())
        assert applications.application_for_key(key) == "shop"
        ask(Client(headers={"Authorization": f"Application {key}"}), "GET", "/v1/shop", status=200)
        # Wrong credentials.
        for scheme, address in (("Token", "/api/me/"), ("Application", "/v1/shop"), ("Bearer", "/metrics")):
            wrong = search.plant(f"a wrong {scheme}", uuid.uuid4().hex * 2)
            ask(Client(), "GET", address, status=401, Authorization=f"{scheme} {wrong}")
        # A queue that causes notifications by mail and channel.
        amqp.queue(f"queue/{name}/builds", 6)
        once.run_once()
        assert sending.send_due().sent
        # Failures: the channel refuses, the mail server rejects the login, the broker is unavailable.
        webhook.status = 500
        ask(program, "POST", f"{of_channel}test/", status=409)
        assert Channel.objects.get().last_error
        settings.EMAIL_HOST_USER, settings.EMAIL_HOST_PASSWORD = "guardian", search.plant("the mail server's password")
        ask(Client(), "POST", "/signin/", {"email": "bob@example.org"}, form=True, status=503)
        credentials = f"guardian:{search.plant('the password of the broker that is away')}"
        settings.RABBITMQ_MANAGEMENT_URL = f"http://{credentials}@{NOBODY}"
        settings.RABBIT_URL = f"amqp://{credentials}@{NOBODY}"
        once.run_once()
        sending.send_due()
        assert Notification.objects.exclude(last_error="").exists()
        ask(program, "POST", "/api/pulse-users/", {**pulse_user, "username": f"{name}-2"}, status=503)
        ask(program, "POST", f"{path}rotate-password/", {"password": own}, status=503)
        ask(visitor, "POST", page, {"password": own}, form=True, status=503)
        ask(program, "POST", f"{of_agent}register_queue/", {}, status=503)
        ask(program, "POST", f"/api/offerings/{offering.uuid.hex}/events/", event, status=503)
        ask(Client(), "GET", "/readyz", status=503)
        ask(office, "GET", "/admin/", status=200)
        for model in (
            "accounts/auditentry",
            "accounts/authtoken",
            "notifications/notification",
            "notifications/channel",
            "queues/pass",
        ):
            ask(office, "GET", f"/admin/{model}/", status=200)
        output = io.StringIO()
        call_command("check", stdout=output, stderr=output)
        search.collect("manage.py check", output.getvalue())
    finally:
        with suppress(NotOnBroker):
            management.delete_user(name)
    # The search.
    for place_and_text in (*texts_of_database(), *texts_of_files(), *texts_of_mails(mailbox.mails)):
        search.collect(*place_and_text)
    printed = capfd.readouterr()
    for where, text in (("the log", log()), ("the output", printed.out), ("the errors", printed.err)):
        search.collect(where, text)
    assert search.found() == set()
    # The searched texts have the expected content.
    texts = {where: text for where, text, _ in search.texts}
    assert "alice@example.org" in texts["the table accounts_owner"]
    assert AuditEntry.objects.filter(object_repr=name).exists()
    assert name in texts["the table accounts_auditentry"]
    assert "PUT /api/users/" in texts["the log"]
    assert any(
        "notifications.tasks.send_notifications" in text for where, text in texts.items() if where.endswith(".msg")
    )
    assert len(search.secrets) > 25
