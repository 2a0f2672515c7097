"""``manage.py doctor`` on a good installation and on broken ones."""

import io
import json
import os
import re
import shlex
import socket
import ssl
import threading
import time
from contextlib import suppress
from datetime import timedelta
from urllib.parse import quote

import pytest
import time_machine
from django.core.management import call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone
from oidc_provider_mock import run_server_in_thread

from accounts.models import Owner
from agents.models import AgentIdentity, EventSubscription, Offering
from core.models import Lease
from notifications.models import Notification
from queues.models import Pass, Watch
from rabbit import amqp, checkup
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, Permissions
from status.doctor import addresses, database
from status.doctor import broker as doctor_broker
from status.doctor import examine as doctor_examine
from status.doctor import findings as doctor_findings
from status.doctor import settings as doctor_settings
from status.doctor.findings import Finding, Status
from tests.accounts.test_oidc import provider_at
from tests.support.proxy import Proxy
from tests.support.served import run_python
from tests.support.toolbox import broker_version, memory_alarm
from tests.support.webhooks import Webhook, make_certificate
from tools.rabbitmq import PrivateNode


@pytest.fixture
def good_installation(guarded, mailbox, settings):
    """Prepare an installation without problems, as far as this machine has one."""
    settings.SECRET_KEY = "0123456789" * 5
    settings.GUARDIAN_BASE_URL = "https://guardian.example.org"
    settings.ALLOWED_HOSTS = ["guardian.example.org", ".localhost", "127.0.0.7"]
    settings.GUARDIAN_METRICS_TOKEN = "scrape-word"
    settings.GUARDIAN_POLL_SECONDS = 60  # so that the last pass is recent throughout a test
    Owner.objects.create_superuser("ops@example.org")
    now = timezone.now()
    Pass.objects.create(at=now, seconds=0.1, listing_seconds=0.05)
    return Watch.objects.update_or_create(id=1, defaults={"listed_at": now, "consumers_counted_at": now})[0]


def examine():
    """Return the findings by name, the worst of each."""
    findings = sorted(doctor_examine.examine(), key=lambda finding: list(Status).index(finding.status))
    return {finding.name: finding for finding in findings}


def assert_problem(name, *words, status=Status.PROBLEM, consequence=""):
    """Assert that this is the only problem, apart from its consequence, with these words and with advice."""
    found = examine()
    finding = found[name]
    assert finding.status is status, finding
    for word in words:
        assert word in f"{finding.found}\n{finding.advice}", finding
    assert finding.advice
    others = [one for one in found.values() if one.status is Status.PROBLEM and one.name not in (name, consequence)]
    assert others == []
    return finding


def test_a_good_installation_has_no_problems_and_is_not_changed(good_installation, mailbox, management):
    before = {model: model.objects.count() for model in (Notification, Lease, Pass, Watch)}
    queues = management.list_queues(None, {"disable_stats": "true", "columns": "name,vhost"})
    found = examine()
    assert {model: model.objects.count() for model in before} == before
    assert management.list_queues(None, {"disable_stats": "true", "columns": "name,vhost"}) == queues
    assert mailbox.mails == []
    not_right = [finding for finding in found.values() if finding.status is not Status.OK]
    # SQLite is a warning, since the number of machines is unknown.
    assert [finding.name for finding in not_right] == (["database"] if connection.vendor == "sqlite" else [])
    assert {
        "settings", "secret key", "debug", "address", "folder", "database", "migrations", "passes", "other tasks",
        "operators", "outbox", "leases", "task queue", "task queue apart", "broker", "broker version",
        "broker user", "broker statistics", "broker plugins", "vhosts", "permissions", "nodes", "memory alarm",
        "broker over AMQP", "broker clock", "mail server",
    } <= found.keys()  # fmt: skip
    assert ("database clock" if connection.vendor == "postgresql" else "database journal") in found
    assert not [finding for finding in found.values() if finding.status is Status.OK and finding.advice]


# The command


def run(*arguments):
    out = io.StringIO()
    with pytest.raises(SystemExit) as end:
        call_command("doctor", *arguments, stdout=out, no_color=True)
    return end.value.code, out.getvalue()


def test_with_a_problem_the_command_exits_with_1_and_gives_advice(good_installation, settings):
    settings.GUARDIAN_VHOSTS = [*settings.GUARDIAN_VHOSTS, "nowhere"]
    code, out = run()
    assert code == 1
    assert re.search(r"^PROBLEM  vhosts +not on the broker: 'nowhere'\n +To do: .*add_vhost", out, re.M)


def test_the_json_output_is_one_object(good_installation, settings):
    code, out = run("--json")
    answer = json.loads(out)
    assert (code, answer["ok"]) == (0, True)
    assert all(check.keys() == {"name", "status", "found", "advice"} for check in answer["checks"])
    settings.EMAIL_PORT = 1
    code, out = run("--json")
    answer = json.loads(out)
    assert (code, answer["ok"]) == (1, False)
    (problem,) = [check for check in answer["checks"] if check["status"] == "problem"]
    assert problem["name"] == "mail server"
    assert "127.0.0.1, port 1" in problem["found"]
    assert "EMAIL_URL" in problem["advice"]


# The broker


def test_an_unreachable_broker_is_a_problem(good_installation, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:secret-word@127.0.0.1:1"
    assert_problem("broker", "can't connect to http://127.0.0.1:1")
    settings.RABBIT_URL = "amqp://guest:secret-word@127.0.0.1:1"
    found = examine()
    assert {found[name].status for name in ("broker", "broker over AMQP")} == {Status.PROBLEM}
    assert "secret-word" not in str(found)


def test_a_wrong_password_is_a_problem(good_installation, settings, broker):
    settings.RABBITMQ_MANAGEMENT_URL = re.sub(":[^:@]*@", ":secret-word@", broker.management_url)
    assert "secret-word" not in str(assert_problem("broker", "401", "password"))
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    settings.RABBIT_URL = re.sub(":[^:@]*@", ":secret-word@", broker.amqp_url)
    assert "secret-word" not in str(assert_problem("broker over AMQP", "ACCESS_REFUSED", "password"))


def test_a_full_vhost_is_a_problem_with_its_remedy(good_installation, guarded, amqp, management):
    management._put("vhost-limits", guarded, "max-connections", json={"value": 1})
    try:
        problem = assert_problem("broker over AMQP", "connection limit (1) is reached", "raise this limit")
    finally:
        management._delete("vhost-limits", guarded, "max-connections")
    assert "permissions" not in problem.advice


@pytest.fixture
def create_user(management, broker, settings):
    """Return a function that creates a RabbitMQ user with these tags for Guardian."""
    name = f"doctor-{os.getpid()}"

    def make(*tags, **permissions):
        management.put_user(name, "secret-word", tags)
        for vhost, granted in permissions.items():
            management.set_permissions(vhost, name, granted)
        for setting, url in (("RABBITMQ_MANAGEMENT_URL", broker.management_url), ("RABBIT_URL", broker.amqp_url)):
            setattr(settings, setting, re.sub("//[^@]*@", f"//{name}:secret-word@", url))
        return name

    yield make
    management.delete_user(name)


def test_a_rabbitmq_user_that_is_no_administrator_is_a_problem(good_installation, guarded, create_user):
    name = create_user("management", **{guarded: FULL_ACCESS})
    assert_problem("broker user", name, f"rabbitmqctl set_user_tags {name} administrator")


@pytest.mark.parametrize(
    "granted", [Permissions("^queue/.*", ".*", ".*"), Permissions(".*", "^queue/", ".*"), Permissions(".*", ".*", "^$")]
)
def test_missing_permissions_on_a_guarded_vhost_are_a_problem(good_installation, guarded, create_user, granted):
    name = create_user("administrator", **{guarded: granted})
    remedy = f"rabbitmqctl set_permissions -p {guarded} {name} '.*' '.*' '.*'"
    consequence = "" if granted.configure == ".*" else "broker over AMQP"
    assert_problem("permissions", f"'{guarded}'", remedy, consequence=consequence)


def test_missing_permissions_over_amqp_are_a_problem(
    good_installation, guarded, create_user, settings, broker, management
):
    name = create_user(**{guarded: Permissions("^$", "^$", "^$")})
    settings.RABBITMQ_MANAGEMENT_URL = broker.management_url
    found = examine()
    assert found["permissions over AMQP"].status is Status.PROBLEM
    assert f"'{name}' may not do everything on '{guarded}'" in found["permissions over AMQP"].found
    assert f"set_permissions -p {guarded} {name} '.*'" in found["permissions over AMQP"].advice
    assert found["broker over AMQP"].status is Status.PROBLEM
    assert "ACCESS_REFUSED" in found["broker over AMQP"].found
    assert "permissions" in found["broker over AMQP"].advice


def test_denied_features_of_rabbitmq_are_explained(good_installation, settings, guarded, management):
    if broker_version(management) < (4, 3):
        pytest.skip("RabbitMQ before 4.3 doesn't report denied features")
    denied = ("transient_nonexcl_queues", "management_metrics_collection")
    with PrivateNode(config={f"deprecated_features.permit.{feature}": "false" for feature in denied}) as node:
        own_management = Management(node.management_url)
        own_management.create_vhost(guarded)
        own_management.close()
        settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = node.management_url, node.amqp_url
        found = examine()
        assert not [one for one in found.values() if one.status is Status.PROBLEM]
        assert found["transient queues"].status is Status.OK
        assert "deprecated_features.permit.management_metrics_collection" in found["broker statistics"].advice


def test_permissions_of_an_external_pulse_user_are_a_warning(guarded, management):
    finding = doctor_broker._permissions(management, "somebody-of-ldap", [guarded], set())
    assert (finding.status, "none of RabbitMQ's own users" in finding.found) == (Status.WARNING, True)


class GrantsNothing:
    def permissions_of(self, pulse_user):
        return {}


def test_names_from_the_broker_are_escaped_in_findings_and_commands():
    vhost, name = "a\n\x1b[2J\u202eb", "x'; reboot '"
    finding = doctor_broker._permissions(GrantsNothing(), name, [vhost], set())
    assert r"on 'a\x0a\x1b[2J\u202eb': queues" in finding.found
    command = finding.advice.removeprefix("Run: ")
    assert shlex.split(command)[3:5] == [r"a\x0a\x1b[2J\u202eb", name]
    assert shlex.split(doctor_broker._tag(name, ()).advice.removeprefix("Run: "))[2:] == [name, "administrator"]
    masked = doctor_findings.without_passwords(Finding("broker", Status.OK, "cluster 'a\x1b[2J\u202e'"))
    assert masked.found == r"cluster 'a\x1b[2J\u202e'"


@pytest.mark.parametrize("setting", ["GUARDIAN_VHOSTS", "GUARDIAN_PULSE_VHOST"])
def test_a_missing_configured_vhost_is_a_problem(good_installation, settings, guarded, setting):
    settings.GUARDIAN_VHOSTS = [guarded, "nowhere"] if setting == "GUARDIAN_VHOSTS" else ["*"]
    if setting == "GUARDIAN_PULSE_VHOST":
        settings.GUARDIAN_PULSE_VHOST = "nowhere"
    finding = examine()["vhosts"]
    assert finding.status is Status.PROBLEM
    assert "not on the broker: 'nowhere'" in finding.found


@pytest.fixture(scope="module")
def another(own_node):
    """Return a node of another cluster, named "another"."""
    own_node.eval('rabbit_nodes:set_cluster_name(<<"another">>, <<"tests">>)')
    return own_node


def test_management_and_amqp_urls_of_two_brokers_are_a_problem(good_installation, settings, guarded, another):
    management = Management(another.management_url)
    management.create_vhost(guarded)
    settings.RABBIT_URL = another.amqp_url
    assert_problem("one broker", "'another'")
    # And the same node over HTTP: it has no plugin for agents.
    settings.RABBITMQ_MANAGEMENT_URL = another.management_url
    found = examine()
    assert (found["broker plugins"].status, found["broker"].status) == (Status.WARNING, Status.OK)
    assert "rabbitmq-plugins enable rabbitmq_web_stomp" in found["broker plugins"].advice
    owner, offering = Owner.objects.get(), Offering.objects.create(name="compute")
    identity = AgentIdentity.objects.create(owner=owner, offering=offering, name="cellar")
    EventSubscription.objects.create(owner=owner, identity=identity, object_type="order")
    assert_problem("broker plugins")
    with memory_alarm(another):
        is_problem_of = {
            finding.name: finding for finding in doctor_examine.examine() if finding.status is Status.PROBLEM
        }
    assert f"The memory alarm is raised on {another.name}" in is_problem_of["memory alarm"].found
    # As management.disable_stats in its configuration.
    another.eval("application:set_env(rabbitmq_management, disable_management_stats, true)")
    found = examine()
    another.eval("application:unset_env(rabbitmq_management, disable_management_stats)")
    assert found["broker statistics"].status is Status.WARNING
    assert "management.disable_stats" in found["broker statistics"].advice
    assert "broker plugins" not in found


# Several addresses


def two_addresses(settings, broker, *, management, over_amqp=None):
    """Set two addresses of each kind: the broker's, and another one or the broker's under another name."""
    over_amqp = over_amqp or broker.amqp_url.replace("127.0.0.1", "localhost")
    settings.RABBITMQ_MANAGEMENT_URL = f"{broker.management_url},{management}"
    settings.RABBIT_URL = f"{broker.amqp_url},{over_amqp}"


def addresses_found():
    return list(addresses.check_addresses())


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda url: url.replace("127.0.0.1", "localhost"), Status.OK, "answers and accepts the login"),
        (lambda url: re.sub(r":\d+/?$", ":1", url), Status.WARNING, "127.0.0.1:1 does not answer"),
        (lambda url: re.sub(":[^:@]*@", ":secret-word@", url), Status.PROBLEM, "can't be used"),
    ],
    ids=["the same", "no answer", "a wrong password"],
)
def test_each_of_several_addresses_is_checked(good_installation, settings, broker, change, status, words):
    assert addresses_found() == []  # one of each kind is not reported separately
    two_addresses(settings, broker, management=change(broker.management_url), over_amqp=change(broker.amqp_url))
    found = [one for one in addresses_found() if one.name == "broker address" and words in one.found]
    assert [one.status for one in found] == [status] * (4 if status is Status.OK else 2)
    assert "secret-word" not in str(doctor_examine.examine())


def test_an_address_with_another_rabbitmq_user_is_reported(good_installation, settings, broker, create_user):
    create_user("administrator")
    two_addresses(settings, broker, management=settings.RABBITMQ_MANAGEMENT_URL)
    assert ("one RabbitMQ user", Status.WARNING) in [(one.name, one.status) for one in addresses_found()]


def test_an_address_of_another_cluster_is_a_problem(good_installation, settings, broker, another):
    two_addresses(settings, broker, management=another.management_url)
    (finding,) = [one for one in addresses_found() if one.name == "one cluster"]
    assert finding.status is Status.PROBLEM
    assert f"127.0.0.1:{another.management_port} leads to another cluster than" in finding.found


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.9.29", "problem"), ("3.10.0", "ok"), ("3.13.7", "ok"), ("4.0.2", "ok"), ("4.1.0-rc.1", "ok"), ("", "problem")],
)
def test_rabbitmq_versions_from_3_10_are_supported(version, status):
    assert doctor_broker._version(version).status == status


@pytest.mark.parametrize(("seconds", "status", "words"), [(-20, "warning", "ahead of"), (90, "problem", "behind")])
def test_a_clock_difference_is_a_warning_or_a_problem(good_installation, seconds, status, words):
    with time_machine.travel(timezone.now() + timedelta(seconds=seconds), tick=True):
        finding = examine()["broker clock"]
    assert (finding.status, words in finding.found) == (status, True)


@pytest.fixture
def tls_server(tmp_path, monkeypatch):
    """Return the port of a TLS server whose certificate is valid for 127.0.0.1 but not for 127.0.0.2."""
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), context.wrap_socket(client, server_side=True) as server:
                heard.append(server.recv(4))

    heard = []
    with socket.create_server(("", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], heard
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "ask",
    [
        lambda url: checkup.server_properties(url),
        lambda url: amqp.new_connection(url, "/", 5).connect(),
    ],
    ids=["server_properties", "new_connection"],
)
def test_over_tls_the_password_goes_only_to_the_named_host(tls_server, ask):
    port, heard = tls_server
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(f"amqps://guardian:secret-word@127.0.0.2:{port}")
    assert heard == []
    with pytest.raises(OSError) as hung_up:
        ask(f"amqps://guardian:secret-word@127.0.0.1:{port}")
    assert not isinstance(hung_up.value, ssl.SSLCertVerificationError)
    assert heard == [b"AMQP"]


@pytest.fixture
def untrusted(tmp_path, monkeypatch):
    """Return an HTTPS server whose certificate is from an authority that this machine doesn't trust, and the file."""
    certificate = make_certificate(tmp_path)
    with Webhook(certificate) as server:
        yield server, certificate


AUTHORITY = "SSL_CERT_FILE: see docs/operators.md#certificates-of-a-private-authority"


def test_certificates_of_a_private_authority_are_a_problem_until_it_is_trusted(
    good_installation, settings, untrusted, monkeypatch
):
    server, certificate = untrusted
    settings.RABBITMQ_MANAGEMENT_URL = f"https://guest:secret-word@localhost:{server.port}"
    settings.RABBIT_URL = f"amqps://guest:secret-word@localhost:{server.port}"
    settings.OIDC_ISSUER = f"https://localhost:{server.port}"
    settings.OIDC_CLIENT_ID = settings.OIDC_CLIENT_SECRET = "guardian"
    settings.SOCIALACCOUNT_PROVIDERS = provider_at(settings.OIDC_ISSUER)
    settings.EMAIL_USE_SSL, settings.EMAIL_PORT = True, server.port
    names = ("broker", "broker over AMQP", "single sign-on", "mail server")
    found = examine()
    for name in names:
        assert found[name].status is Status.PROBLEM, name
        assert "CERTIFICATE_VERIFY_FAILED" in found[name].found, name
        assert AUTHORITY in found[name].advice, name
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    found = examine()  # the server there is no broker, mail server or provider
    for name in names:
        assert AUTHORITY not in found[name].advice, name
        assert "CERTIFICATE" not in found[name].found, name


def test_a_file_of_authorities_that_does_not_exist_is_a_problem(good_installation, monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    assert_problem("certificates", "none.pem", "No such file")
    (tmp_path / "none.pem").write_text("no certificate")
    assert_problem("certificates", "none.pem")


# Single sign-on


def test_an_issuer_that_answers_is_ok(good_installation, settings):
    with run_server_in_thread() as server:
        settings.OIDC_ISSUER = f"http://localhost:{server.server_port}"
        settings.OIDC_CLIENT_ID = settings.OIDC_CLIENT_SECRET = "guardian"
        settings.SOCIALACCOUNT_PROVIDERS = provider_at(settings.OIDC_ISSUER)
        assert examine()["single sign-on"].status is Status.OK
    settings.OIDC_ISSUER += "/elsewhere"
    settings.SOCIALACCOUNT_PROVIDERS = provider_at(settings.OIDC_ISSUER)
    assert_problem("single sign-on", "/elsewhere", "OIDC_ISSUER")


# The task queue


@pytest.mark.parametrize("scheme", ["amqp", "pyamqp"])
def test_the_guarded_broker_under_another_name_as_task_queue_is_a_problem(good_installation, broker, scheme):
    with Proxy.before(broker.amqp_url) as proxy:
        finding = database._is_not_guarded(proxy.url(broker.amqp_url).replace("amqp", scheme, 1))
    assert (finding.status, "both have the cluster name" in finding.found) == (Status.PROBLEM, True)


def test_an_unreachable_amqp_task_queue_is_a_warning(good_installation):
    finding = database._is_not_guarded("amqp://guest:guest@127.0.0.1:1")
    assert (finding.status, "could not be compared" in finding.found) == (Status.WARNING, True)


# The database and its rows


@pytest.fixture
def pending_migration(transactional_db):
    recorder, migration = MigrationRecorder(connection), ("core", "0002_labels")  # it changes no table
    recorder.record_unapplied(*migration)
    yield ".".join(migration)
    recorder.record_applied(*migration)


def test_a_pending_migration_is_a_problem(good_installation, pending_migration):
    assert_problem("migrations", f"1 pending: {pending_migration}", "manage.py migrate")


def test_missing_operators_stuck_mails_and_abandoned_leases_are_warnings(good_installation):
    now = timezone.now()
    Owner.objects.update(is_active=False)
    for fields in (
        {"created": now - timedelta(minutes=20), "last_error": "Connection refused: smtp://me:secret-word@mail"},
        {"created": now - timedelta(hours=5), "deferred_until": now + timedelta(hours=1)},
        {"created": now - timedelta(hours=5), "state": "sent"},
    ):
        row = {"kind": "outage", "recipient": "ops@example.org", "facts": {}, "due_at": now, **fields}
        Notification.objects.create(**row)
    holder = "00000000-0000-0000-0000-000000000001"
    Lease.objects.create(name="prune", holder=holder, expires_at=now - timedelta(hours=30))
    Lease.objects.create(name="pass", holder=holder, expires_at=now - timedelta(seconds=30))
    Lease.objects.create(name="weekly", holder=None, expires_at=now - timedelta(days=30))
    found = examine()
    for name, words in (
        ("operators", "create_owner"),
        ("outbox", "has waited for 20 minutes"),
        ("outbox", "Connection refused"),
        ("leases", "'prune' was killed 30 hours ago"),
    ):
        assert found[name].status is Status.WARNING, name
        assert words in f"{found[name].found}\n{found[name].advice}"
    assert "secret-word" not in found["outbox"].found


# Mail


def test_a_mail_server_that_refuses_the_login_is_a_problem(good_installation, settings):
    settings.EMAIL_HOST_USER, settings.EMAIL_HOST_PASSWORD = "guardian", "secret-word"
    assert "secret-word" not in str(assert_problem("mail server"))


@pytest.fixture
def silent_server():
    """Return the port of a server that accepts connections and stays silent."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield listener.getsockname()[1]


# Settings and this machine


@pytest.mark.parametrize(
    ("allowed", "address", "status"),
    [
        (["127.0.0.1"], "https://guardian.example.org", "problem"),
        ([], "https://guardian.example.org", "problem"),
        ([".example.org"], "https://Guardian.example.org:8443/", "ok"),
        (["*"], "https://guardian.example.org", "ok"),
        (["[2001:db8::1]"], "https://[2001:db8::1]:8443", "ok"),
    ],
)
def test_the_host_of_links_must_be_in_allowed_hosts(settings, allowed, address, status):
    settings.ALLOWED_HOSTS, settings.GUARDIAN_BASE_URL = allowed, address
    (finding,) = doctor_settings._base_url()
    assert finding.status == status
    assert ("ALLOWED_HOSTS" in finding.found) is (status == "problem")


def test_weak_settings_are_warnings(good_installation, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = []
    settings.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
    for secret, address in (("short", "http://guardian.example.org"), ("ab" * 40, "http://127.0.0.7:8000")):
        settings.SECRET_KEY, settings.GUARDIAN_BASE_URL = secret, address
        weak = {name for name, finding in examine().items() if finding.status is Status.WARNING and finding.advice}
        assert weak >= {"secret key", "address", "settings", "mail server"}
    settings.DEBUG = True
    assert examine()["debug"].status is Status.WARNING


def test_an_unusable_task_queue_and_folder_are_problems(good_installation, settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings.VAR_DIR = tmp_path / "file" / "var"
    settings.CELERY_BROKER_URL = "memory://"
    found = examine()
    assert (found["folder"].status, "can't be written" in found["folder"].found) == (Status.PROBLEM, True)
    assert (found["task queue"].status, "redis://" in found["task queue"].advice) == (Status.PROBLEM, True)


# As a separate process


def doctor_of(environment, *arguments):
    answer = run_python({**os.environ, **environment}, "manage.py", "doctor", *arguments)
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "secret-word" not in answer.stdout + answer.stderr
    return answer


# Secrets


@pytest.mark.parametrize("password", ["s3cr/hunter2", "99999/hunter2", "s3cr#hunter2", "[hunter2"])
def test_no_part_of_a_password_that_breaks_its_url_is_shown(good_installation, settings, password):
    settings.CELERY_BROKER_URL = f"redis://:{password}@127.0.0.1:1/0"
    settings.RABBIT_URL = f"amqp://guardian:{password}@127.0.0.1:1"
    settings.RABBITMQ_MANAGEMENT_URL = f"http://guardian:{password}@127.0.0.1:1"
    findings = doctor_examine.examine()
    problems = [finding for finding in findings if finding.status is Status.PROBLEM]
    assert sorted({finding.name for finding in problems}) == ["broker", "settings"]
    for part in re.findall(r"\w{4,}", password):
        assert part not in str(findings)
    assert "%2F" in str(problems)


def test_an_unexpected_error_is_reported_without_its_value(monkeypatch):
    def fails():
        int("hunter2")
        yield

    look = doctor_examine._Check("task queue", fails)
    look.start()
    (finding,) = look.found_by(time.monotonic() + 5)
    assert finding.found == "the check failed: ValueError: it can't be read"


@pytest.mark.parametrize("password", ["abc", "secret-word", "se cret", "a.c"])
def test_a_password_of_any_length_is_masked(settings, password):
    settings.RABBIT_URL = f"amqp://guardian:{quote(password)}@127.0.0.1"
    found = f"it said '{password}', and {quote(password)}: no abcess"
    masked = doctor_findings.without_passwords(Finding("broker", Status.OK, found))
    assert masked.found == "it said '…', and …: no abcess"


def test_advice_is_not_masked(settings):
    settings.RABBIT_URL, settings.RABBITMQ_MANAGEMENT_URL = "amqp://guest:password@127.0.0.1:1", "ftp://x"
    (finding,) = (doctor_findings.without_passwords(finding) for finding in doctor_broker.check_broker())
    assert finding.advice == "Write it as http://user:password@host:15672."
    assert finding.found == "RABBITMQ_MANAGEMENT_URL can't be used: it doesn't start with http:// or https://"


def test_guest_as_a_name_is_not_masked(settings):
    settings.RABBIT_URL = settings.RABBITMQ_MANAGEMENT_URL = "amqp://guest:guest@127.0.0.1:1"
    masked = doctor_findings.without_passwords(Finding("broker user", Status.OK, "'guest' is an administrator"))
    assert masked.found == "'guest' is an administrator"


def test_invalid_settings_are_reported_with_all_other_findings(tmp_path):
    (tmp_path / "file").write_text("")
    answer = doctor_of(
        {
            "SECRET_KEY": "",
            "GUARDIAN_MAX_QUEUE_LENGTH": "many",
            "DATABASE_URL": "postgres://guardian:secret-word/hunter2@127.0.0.1/x",
            "RABBITMQ_MANAGEMENT_URL": "http://guest:secret-word@[x",
            "RABBIT_URL": "guest:secret-word",
            "CELERY_BROKER_URL": "nothing://guest:secret-word@host",
            "EMAIL_URL": "smtp://guardian:12345/hunter2@127.0.0.1/x",
            "GUARDIAN_IGNORED_QUEUES": "(",
            "GUARDIAN_BASE_URL": "guardian",
            "GUARDIAN_POLL_SECONDS": "abc",
            "SENTRY_DSN": "https://secret-word@host:abc/1",
            "GUARDIAN_VAR_DIR": str(tmp_path / "file" / "var"),
        },
    )
    assert answer.returncode == 1
    assert "12345" not in answer.stdout + answer.stderr
    assert "hunter2" not in answer.stdout + answer.stderr
    for words in (
        "SECRET_KEY is empty", "GUARDIAN_MAX_QUEUE_LENGTH can't be read", "DATABASE_URL can't be read",
        "RABBITMQ_MANAGEMENT_URL is not a valid URL", "RABBIT_URL is not a valid URL", "EMAIL_URL can't be read",
        "GUARDIAN_IGNORED_QUEUES is not a regular expression", "GUARDIAN_BASE_URL is not a valid URL",
        "GUARDIAN_POLL_SECONDS can't be read", "SENTRY_DSN is not the address of a project",
    ):  # fmt: skip
        assert re.search(rf"^PROBLEM  settings +{re.escape(words)}", answer.stdout, re.M), words
    for name in ("task queue", "folder", "database"):
        assert re.search(rf"^PROBLEM  {name} ", answer.stdout, re.M), name


@pytest.mark.slow
def test_if_nothing_responds_the_command_ends_in_time(silent_server, tmp_path):
    began = time.monotonic()
    answer = doctor_of(
        {
            "CELERY_BROKER_URL": f"redis://127.0.0.1:{silent_server}/0",
            "DATABASE_URL": f"postgres://guardian:secret-word@127.0.0.1:{silent_server}/guardian",
            "RABBITMQ_MANAGEMENT_URL": f"http://guest:secret-word@127.0.0.1:{silent_server}",
            "RABBIT_URL": f"amqp://guest:secret-word@127.0.0.1:{silent_server}",
            "EMAIL_URL": f"smtp://127.0.0.1:{silent_server}",
            "GUARDIAN_VAR_DIR": str(tmp_path),
        },
        "--json",
    )
    assert time.monotonic() - began < 25
    assert answer.returncode == 1
    found = {check["name"]: check["status"] for check in json.loads(answer.stdout)["checks"]}
    for name in ("database", "task queue", "broker over AMQP", "mail server"):
        assert found[name] == "problem", name
    assert "migrations" not in found
    assert found["broker"] == "warning"


def test_a_check_that_hangs_is_abandoned(monkeypatch, settings):
    def hangs():
        yield Finding("mail server", Status.OK, "was seen")
        time.sleep(30)

    def fails():
        yield Finding("task queue", Status.OK, "was seen")
        raise RuntimeError("amqp://guest:secret-word@host")

    for name in ("check_database", "check_broker", "check_amqp", "check_broker_clock"):
        monkeypatch.setattr(doctor_examine, name, lambda: iter(()))
    monkeypatch.setattr(doctor_examine, "check_mail_server", hangs)
    monkeypatch.setattr(doctor_examine, "check_task_queue", fails)
    monkeypatch.setattr(doctor_examine, "TIMEOUT_SECONDS", 0.5)
    began = time.monotonic()
    findings = doctor_examine.examine()
    assert time.monotonic() - began < 2
    reported = [
        (finding.status, finding.found) for finding in findings if finding.name in ("mail server", "task queue")
    ]
    assert reported == [
        ("ok", "was seen"),
        ("problem", "the check failed: RuntimeError: amqp://guest:…@host"),
        ("ok", "was seen"),
        ("problem", "no answer within 0.5 s"),
    ]
