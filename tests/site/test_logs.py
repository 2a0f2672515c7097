"""The log as lines and as JSON, without secrets."""

import io
import json
import logging
import os
import re
import sys
import time

import httpx
import pytest
from django.test import Client

from accounts.access.tokens import create_token
from accounts.models import Owner
from core import broker
from core.masking import mask_secrets
from guardian_site import tracing
from guardian_site.logs import JSONLinesFormatter, LineFormatter
from rabbit.errors import BrokerError
from rabbit.management import Management
from rabbit.requests.sending import Call
from tests.support.plugin import ROOT
from tests.support.proxy import Proxy
from tests.support.toolbox import wait_until
from tools.processes import end, free_port, port_answers, spawn

TOKEN = "0123456789abcdef" * 4
MARKER = "open-sesame"


@pytest.fixture(params=[LineFormatter, JSONLinesFormatter], ids=["line", "json"])
def log(request):
    """Return a logger and a function that returns its output."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(request.param())
    logger = logging.Logger("tests.log")
    logger.addHandler(handler)
    return logger, written.getvalue


@pytest.fixture
def json_log():
    """Write the site's log as JSON, with DEBUG, and return a function that returns a logger's records."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JSONLinesFormatter())
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda logger: [
        record for line in written.getvalue().splitlines() if (record := json.loads(line))["logger"] == logger
    ]
    root.removeHandler(handler)
    root.setLevel(level)


SECRET_TEXTS = [
    f"Not Found: /signin/link/{MARKER}/",
    f"Not Found: /addresses/{MARKER}/",
    f"can't connect to amqp://guardian:{MARKER}@rabbit:5672/%2F",
    f"amqp://guardian:half@{MARKER}@rabbit:5672",
    f"redis://:{MARKER}@127.0.0.1/0",
    f"https://{MARKER}@sentry.example.org/1",
    f"'http://guardian:{MARKER}@rabbit:15672', 'http://guest:{MARKER}@b'",
    f"Authorization: Token {TOKEN}",
    f"the user's password is {TOKEN}",
    f"authorization: bearer {MARKER}.{MARKER}",
    f"{{'Authorization': 'Basic {MARKER}'}}",
    f"https://example.org/hook?sig={MARKER}",
    f"{{'password': b'a \\x00{MARKER}'}}",
    f"Basic {MARKER}{MARKER}",
    f'{{"password": "{MARKER}", "username": "alice"}}',
    f"password={MARKER}&next=/",
    f"{{'client_secret': '{MARKER}'}}",
    f"/signin/oidc/callback/?state=x&code={MARKER}",
    f"Cookie: sessionid={MARKER}; theme=dark",
    f"password='my long {MARKER}'",
    f'{{"password":"a\\"b {MARKER}"}}',
    f"{{'password': 'it\\'s {MARKER}'}}",
    f'"{{\\"password\\": \\"a b, {MARKER}\\"}}"',
    f'"{{\\"password\\": \\"a\\\\\\"b {MARKER}\\"}}"',
    f"http://guardian:half/{MARKER}@rabbit:15672/x",
    f"amqp://guardian:half#{MARKER}@rabbit",
    f"redis://:12/{MARKER}@redis:6379/0",
    f"http://a:b/{MARKER}@rabbit,http://c:d/{MARKER}@rabbit",
    f"passcode: {MARKER}",
    f"GUARDIAN_METRICS_TOKEN={MARKER}",
    f"X-Api-Key: {MARKER}",
    f"{{'token': '{MARKER}'}}",
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_no_secret_is_logged(log, text):
    logger, written = log
    logger.warning(text.replace("%", "%%"))
    logger.warning("It says: %s", text)
    logger.warning("It says: %(text)s", {"text": text})
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError("because of the other") from error
    except RuntimeError:
        logger.exception("It failed")
    logger.warning("A request", extra={"path": text, "outcome": text, "status": {"tried": [text]}})
    assert "because of the other" in written()
    assert MARKER not in written()
    assert TOKEN not in written()
    assert written().count("…") + written().count("\\u2026") >= 4


@pytest.mark.parametrize(
    "text",
    [
        "GET /api/queues/%2F/queue%2Falice%2Fbuilds: can't connect to http://10.0.0.1:15672 (timed out)",
        "Mail to alice@example.org and bob@example.org",
        "https://guardian.example.org/queues/0123456789abcdef0123456789abcdef/?search=a@b",
        "see https://example.org/ and ask ops@example.org",
        "http://[::1]:15672/a@b and http://rabbit:15672/?search=a@b",
        'The word "password" is here, and "token" too: "said"',
        "The token expired on 3 May; another token is on the page Tokens.",
        "0123456789abcdef" * 5,
        "amqp://guardian:…@rabbit:5672/%2F",
    ],
)
def test_texts_without_secrets_are_unchanged(text):
    assert mask_secrets(text) == text


@pytest.mark.parametrize(
    "part",
    ["a", "0", " ", '"', "'", "\\", '\\"', 'password="', 'password=\\"', "token'", "://a:b/", "://", "://a",
     ":", "://:", "@", "/signin/link/", "token ", "token    ", "basic", "password",
     "password ", "password=", "?code", "?code=", "secret_key", "/", "\n", "\x1b"],
)  # fmt: skip
@pytest.mark.parametrize("begins", ["", "://", "token a", "password='", 'password=\\"'])
def test_masking_takes_time_linear_in_the_length(begins, part):
    def seconds(length):
        text = begins + part * (length // len(part))
        began = time.process_time()
        mask_secrets(text)
        return time.process_time() - began

    assert any(seconds(100_000) < 0.5 for _ in range(2))  # quadratic time would take 7 s


def test_control_characters_in_a_name_are_escaped():
    record = logging.LogRecord(
        "queues", logging.INFO, "", 0, "%s was deleted", ("x\n2026-01-01 ERROR \x1b[2J\r\x9b\u2028y",), None
    )
    line = LineFormatter().format(record)
    first, second = line.split("\n")
    assert first.endswith("INFO queues: x")
    assert second == "  2026-01-01 ERROR \\x1b[2J\\x0d\\x9b\\u2028y was deleted"
    assert len(JSONLinesFormatter().format(record).splitlines()) == 1


def test_an_unencodable_text_is_logged(log):
    logger, written = log
    logger.warning("%s", "half \ud800 of it")
    assert "of it" in written().encode("utf-8", "backslashreplace").decode()


def test_a_traceback_is_indented_below_its_line(log):
    logger, written = log
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("It failed")
    lines = written().splitlines()
    if len(lines) == 1:
        assert json.loads(lines[0])["exception"].endswith("ValueError: first\nsecond")
    else:
        assert all(line.startswith("  ") for line in lines[1:])
        assert lines[-2:] == ["  ValueError: first", "  second"]


def test_each_line_has_the_request_id(log):
    logger, written = log
    with tracing.use_id("this-one"):
        logger.warning("within")
    logger.warning("without")
    within, without = written().splitlines()
    if within.startswith("{"):
        assert json.loads(within)["request_id"] == "this-one"
        assert "request_id" not in json.loads(without)
    else:
        assert within.endswith(" WARNING tests.log [this-one]: within")
        assert without.endswith(" WARNING tests.log: without")


def test_json_records_have_only_known_fields(log):
    logger, written = log
    logger.warning("Bad request", extra={"request": object(), "status": 400, "data": {"password": MARKER}})
    if written().startswith("{"):
        record = json.loads(written())
        assert set(record) == {"time", "level", "logger", "process", "message", "status"}
        assert record["status"] == 400
        assert record["process"] == os.getpid()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", record["time"])
    assert MARKER not in written()


def test_no_field_of_a_json_record_has_a_secret():
    class Thing:
        def __str__(self):
            return f"amqp://guardian:{MARKER}@rabbit"

    record = logging.LogRecord("queues", logging.INFO, "", 0, "done", (), None)
    record.path = {"password": [MARKER], "of": ("x", [f"password={MARKER}"]), "thing": Thing(), "number": 3}
    record.owner = f"password={MARKER}".encode()
    line = JSONLinesFormatter().format(record)
    assert MARKER not in line
    assert json.loads(line)["path"] == {
        "password": "…", "of": ["x", ["password=…"]], "thing": "amqp://guardian:…@rabbit", "number": 3
    }  # fmt: skip


@pytest.mark.django_db
def test_each_request_is_logged_without_its_query(json_log):
    visitor = Client()
    visitor.get("/signin/?next=/queues/")
    visitor.get("/no/such%0Apage")
    (signin, page) = json_log("guardian.requests")
    assert (signin["method"], signin["path"], signin["status"], signin["level"]) == ("GET", "/signin/", 200, "INFO")
    assert "next" not in json.dumps(signin)
    assert "owner" not in signin
    assert re.fullmatch(r"GET /signin/: 200 in [\d.]+ ms, nobody", signin["message"])
    assert (page["path"], page["status"]) == ("/no/such%0Apage", 404)


@pytest.mark.django_db
def test_a_request_is_logged_with_the_owners_uuid(json_log):
    owner = Owner.objects.create_user("alice@example.org", vouched=True)
    visitor = Client()
    visitor.force_login(owner)
    visitor.get("/tokens/")
    key = create_token(owner, "agent")[1]
    Client(headers={"Authorization": f"Token {key}"}).get("/api/me/")
    requests = json_log("guardian.requests")
    assert [request["owner"] for request in requests] == [owner.uuid.hex] * 2
    assert "alice" not in json.dumps(requests)


@pytest.mark.django_db
def test_logging_a_request_does_not_query_its_owner(django_assert_num_queries):
    visitor = Client()
    visitor.force_login(Owner.objects.create_user("alice@example.org"))
    with django_assert_num_queries(0):
        visitor.get("/healthz")


@pytest.mark.django_db
def test_requests_of_probes_and_static_files_are_logged_as_debug(json_log, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    for page in ("/healthz", "/readyz", "/metrics", "/static/guardian.css"):
        Client().get(page)
    assert {request["level"] for request in json_log("guardian.requests")} == {"DEBUG"}


def test_a_broker_request_is_logged_by_its_shape_and_outcome(json_log, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    with tracing.use_id("this-one"), pytest.raises(BrokerError):
        broker.management().queue("/", "queue/alice/secret plans")
    (call,) = json_log("guardian.broker")
    assert (call["method"], call["path"], call["outcome"]) == ("GET", "/api/queues/{vhost}/{name}", "away")
    assert (call["level"], call["request_id"]) == ("DEBUG", "this-one")
    assert call["milliseconds"] >= 0
    assert "alice" not in json.dumps(call)


def test_every_broker_request_is_reported_without_names(broker, vhost):
    calls: list[Call] = []
    management = Management(broker.management_url, on_call=calls.append)
    management.declare_queue(vhost, "q")
    management.declare_exchange(vhost, "e")
    management.bind_queue(vhost, "e", "q", "key")
    management.put_user(vhost, None)
    management.overview()
    management.alarms()
    management.list_queues(None, {"columns": "name"})
    management.list_queues(vhost, {})
    management.queue_bindings(vhost, "q")
    management.exchange_bindings(vhost, "e")
    management.clients(vhost)
    management.connections_of("guest")
    management.permissions_of(vhost)
    management.delete_user(vhost)
    with pytest.raises(BrokerError):
        management.queue(vhost, "not there")
    with pytest.raises(BrokerError):
        management.queue(vhost, "..")  # which isn't sent
    management.close()
    paths = [call.path for call in calls]
    assert not [path for path in paths if vhost in path or "guest" in path]
    assert paths[:3] == [
        "/api/queues/{vhost}/{name}", "/api/exchanges/{vhost}/{name}", "/api/bindings/{vhost}/e/{exchange}/q/{queue}",
    ]  # fmt: skip
    assert paths[-1] == "/api/whoami"  # verifies a 404
    assert [call.outcome for call in calls] == [*["ok"] * 14, "refused", "ok"]
    assert all(0 < call.seconds < 20 for call in calls)


def test_errors_count_as_failed_requests_and_alarms_do_not(broker):
    calls: list[Call] = []
    with Proxy.before(broker.management_url) as proxy:
        management = Management(proxy.url(broker.management_url), on_call=calls.append)
        for answer in ("502 Bad Gateway", "302 Found"):
            proxy.answer(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())
            with pytest.raises(BrokerError):
                management.overview()
        alarms = b'{"alarms": [{"resource": "memory", "node": "rabbit@a"}]}'
        proxy.answer(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(alarms), alarms))
        assert management.alarms() == ["memory on rabbit@a"]
        management.close()
    assert [call.outcome for call in calls] == ["failed", "failed", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["line", "json"])
def test_the_web_process_logs_everything_once_in_one_format(tmp_path, form):
    port = free_port()
    environment = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path}/no-tables.sqlite3",
        "GUARDIAN_VAR_DIR": str(tmp_path),
        "LOG_FORMAT": form,
        "DEBUG": "true",
        "GUARDIAN_PROXIES": "1",  # so that request ids are trusted
    }
    command = [sys.executable, "-m", "gunicorn", "guardian_site.wsgi", "--bind", f"127.0.0.1:{port}"]
    log = tmp_path / "web.log"
    with log.open("wb") as output:
        web = spawn([*command, "--no-control-socket"], environment=environment, directory=ROOT, output=output)
    try:
        wait_until(lambda: port_answers(port))
        headers = {"X-Request-ID": "this-one"}
        for page in ("no-such-page", "healthz", f"signin/link/{MARKER}/"):
            httpx.get(f"http://127.0.0.1:{port}/{page}", headers=headers, timeout=60, trust_env=False)
    finally:
        end(web, timeout=20)
    out = log.read_text()
    assert MARKER not in out
    if form == "json":
        lines = [json.loads(line) for line in out.splitlines()]
        assert "gunicorn.error" in {line["logger"] for line in lines}
        of_requests = [line["message"] for line in lines if line.get("request_id") == "this-one"]
    else:
        of_requests = [line.partition("[this-one]: ")[2] for line in out.splitlines() if "[this-one]" in line]
    assert [re.sub(r"[\d.]+ ms", "… ms", line) for line in of_requests] == [
        "GET /no-such-page: 404 in … ms, nobody",
        "Internal Server Error: /signin/link/…/",
        "GET /signin/link/…/: 500 in … ms, nobody",
    ]
    assert out.count("no such table: accounts_signinlink") == 2  # once by SQLite and once by Django
