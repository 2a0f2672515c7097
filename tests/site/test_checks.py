"""Checks report invalid settings with the reason before anything runs."""

import os
import time

import pytest

from guardian_site import checks, environment
from guardian_site.checks import check_settings
from tests.support.served import run_python


@pytest.fixture(autouse=True)
def good_settings(settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@rabbit:15672"
    settings.RABBIT_URL = "amqp://guest:guest@rabbit:5672"
    settings.GUARDIAN_OPERATOR_EMAILS = ["ops@example.org"]


def reported_ids():
    return [message.id for message in check_settings(None)]


@pytest.mark.parametrize(
    ("name", "value", "id_"),
    [
        ("SECRET_KEY", "", "guardian.E001"),
        ("ALLOWED_HOSTS", [], "guardian.E033"),  # as from a comma alone
        ("ALLOWED_HOSTS", [""], "guardian.E033"),
        ("RABBITMQ_MANAGEMENT_URL", "rabbit:15672", "guardian.E002"),
        ("RABBIT_URL", "http://rabbit", "guardian.E002"),
        ("GUARDIAN_BASE_URL", "guardian.example.org", "guardian.E002"),
        ("RABBIT_URL", "amqp://guardian:123/hunter2@rabbit", "guardian.E002"),
        ("RABBITMQ_MANAGEMENT_URL", "http://guest:guest@rabbit:15672/api", "guardian.E030"),
        ("RABBITMQ_MANAGEMENT_URL", "https://rabbit.example.org/rabbit/api/", "guardian.E030"),
        ("RABBITMQ_MANAGEMENT_URL", "http://rabbit:15672/?x=1", "guardian.E030"),
        ("RABBIT_URL", "amqp://guest:guest@rabbit:5672/prod", "guardian.E030"),
        ("RABBIT_URL", "amqps://rabbit?heartbeat=5", "guardian.E030"),
        ("GUARDIAN_BASE_URL", "https://example.org/guardian", "guardian.E030"),
        ("GUARDIAN_BASE_URL", "https://me:word@example.org", "guardian.E030"),
        ("GUARDIAN_BASE_URL", "https://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.example", "guardian.E030"),
        ("CELERY_BROKER_URL", "", "guardian.E003"),
        ("CELERY_BROKER_URL", "redis://:123/hunter2@redis:6379/0", "guardian.E003"),
        ("CELERY_BROKER_URL", "sentinel://:x@one:26379;sentinel://:s3cr/x@two:26379", "guardian.E003"),
        ("CELERY_BROKER_URL", "amqp://other:5672;amqp://guest:guest@rabbit:5672//", "guardian.E004"),
        ("CELERY_BROKER_URL", "pyamqp://other:word@rabbit/tasks", "guardian.E004"),
        ("GUARDIAN_WARN_QUEUE_LENGTH", 0, "guardian.E011"),
        ("GUARDIAN_WARN_QUEUE_LENGTH", 8000, "guardian.E006"),
        ("GUARDIAN_THRESHOLD_POLICY", "guess", "guardian.E008"),
        ("MESSAGE_STORE", "memory", "guardian.E008"),
        ("MESSAGE_STORE", "cassandra", "guardian.E032"),
        ("CASSANDRA_HOSTS", ["cassandra"], "guardian.W007"),
        ("GUARDIAN_IGNORED_QUEUES", "(", "guardian.E009"),
        ("GUARDIAN_RESERVED_USERS", ["guest", "^ops("], "guardian.E031"),
        ("GUARDIAN_RESERVED_USERS", [".*"], "guardian.E031"),
        ("GUARDIAN_RESERVED_USERS", ["^a{1"], "guardian.E031"),
        ("GUARDIAN_RESERVED_USERS", ["guest", ""], "guardian.E031"),
        ("GUARDIAN_VHOSTS", ["*", "/"], "guardian.E010"),
        ("GUARDIAN_POLL_SECONDS", 0, "guardian.E011"),
        ("GUARDIAN_REMINDER_HOURS", 23, "guardian.E034"),
        ("GUARDIAN_QUIET_SECONDS", 10**12, "guardian.E011"),
        ("GUARDIAN_POLL_SECONDS", float("nan"), "guardian.E011"),
        ("DEFAULT_FROM_EMAIL", "guardian@", "guardian.E016"),
        ("GUARDIAN_VHOSTS", ["prod"], "guardian.W003"),
        ("GUARDIAN_POLL_MAX_SECONDS", 1, "guardian.E013"),
        ("GUARDIAN_OPERATOR_EMAILS", ["nobody"], "guardian.E014"),
        ("GUARDIAN_OPERATOR_EMAILS", ["al\u0131ce@example.org"], "guardian.E014"),
        ("RABBITMQ_MANAGEMENT_URL", "", "guardian.W001"),
        ("GUARDIAN_OPERATOR_EMAILS", [], "guardian.W002"),
        ("GUARDIAN_OWNERS_MAX_QUEUE_LENGTH", -1, "guardian.E017"),
        ("GUARDIAN_OWNERS_MAX_QUEUE_LENGTH", 2000, "guardian.E017"),
        ("GUARDIAN_VOUCHED_DOMAINS", ["alice@example.org"], "guardian.E018"),
        ("GUARDIAN_VOUCHED_DOMAINS", ["*.example.org"], "guardian.E018"),
        ("GUARDIAN_VOUCHED_DOMAINS", [""], "guardian.E018"),
        ("GUARDIAN_VOUCHED_DOMAINS", ["\uff45xample.org"], "guardian.E018"),
        ("OIDC_VOUCHED_GROUPS", ["builders"], "guardian.W004"),
        ("SENTRY_DSN", "sentry.example.org", "guardian.E020"),
        ("SENTRY_DSN", "https://sentry.example.org/1", "guardian.E020"),
    ],
)
def test_a_wrong_setting_is_reported(settings, name, value, id_):
    setattr(settings, name, value)
    messages = check_settings(None)
    assert [message.id for message in messages] == [id_]
    assert messages[0].hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CASSANDRA_HOSTS", []),
        ("CASSANDRA_HOSTS", ["one", "http://two"]),
        ("CASSANDRA_HOSTS", ["me:word@one"]),
        ("CASSANDRA_HOSTS", ["one:port"]),
        ("CASSANDRA_KEYSPACE", "Guardian-1"),
        ("CASSANDRA_REPLICATION", "0"),
        ("CASSANDRA_REPLICATION", "dc1:3"),
        ("CASSANDRA_REPLICATION", "datacenter1:three"),
        ("CASSANDRA_USER", "guardian"),
        ("CASSANDRA_PASSWORD", "word"),
        ("MESSAGE_STORE_MAX_BODY", 1 << 24),
        ("MESSAGE_STORE_DELAY_SECONDS", 0.5),
    ],
)
def test_a_wrong_setting_of_cassandra_is_reported(settings, name, value):
    settings.MESSAGE_STORE, settings.CASSANDRA_HOSTS = "cassandra", ["one", "two:9043"]
    assert check_settings(None) == []
    setattr(settings, name, value)
    messages = check_settings(None)
    assert [message.id for message in messages] == ["guardian.E032"]
    assert name in messages[0].msg


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", r"^(\w+\s?)*$", "^queue/(x|x)*y", "(.*a){25}$", r"^(\d+)*\.$", "^(([a-z])+.)+[A-Z]([a-z])+$"],
)
def test_a_slow_regex_for_ignored_queues_is_warned_about(settings, monkeypatch, pattern):
    settings.GUARDIAN_IGNORED_QUEUES = pattern
    monkeypatch.setattr(checks, "SEARCH_SECONDS", 0.5)
    began = time.monotonic()
    assert reported_ids() == ["guardian.W006"]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RABBITMQ_MANAGEMENT_URL", "https://example.org/rabbit/"),
        ("RABBITMQ_MANAGEMENT_URL", "http://guest:$%23@rabbit:15672"),
        ("RABBIT_URL", "amqps://guest:guest@rabbit/"),
        ("GUARDIAN_BASE_URL", "http://[::1]:8000/"),
        ("CELERY_BROKER_URL", "amqp://guest:guest@other-rabbit:5672"),
        ("GUARDIAN_IGNORED_QUEUES", r"^(amq\.gen|test-)"),
        ("GUARDIAN_IGNORED_QUEUES", r"^queue/ci/.*\.tmp$"),
        ("GUARDIAN_IGNORED_QUEUES", r"^[a-z]+-\d+-.*-(new|old)$"),
        ("GUARDIAN_IGNORED_QUEUES", "(?i)^scratch|keep$"),
        ("GUARDIAN_IGNORED_QUEUES", r"^(?!queue/).*$"),
        ("GUARDIAN_VOUCHED_DOMAINS", ["example.org", "mail.example.org", "localhost"]),
        ("GUARDIAN_OWNERS_MAX_QUEUE_LENGTH", 2001),
        ("SENTRY_DSN", "https://key@sentry.example.org/17"),
    ],
)
def test_a_good_setting_passes(settings, name, value):
    setattr(settings, name, value)
    assert reported_ids() == []


@pytest.mark.parametrize("guarded", ["amqp://guest:guest@localhost:5672", "amqp://g@one:5672,amqp://g@127.0.0.1:5672"])
def test_the_guarded_broker_as_task_queue_is_refused_under_any_loopback_name(settings, guarded):
    settings.RABBIT_URL = guarded
    settings.CELERY_BROKER_URL = "amqp://guest:guest@127.0.0.1:5672"
    assert reported_ids() == ["guardian.E004"]


def test_each_of_several_addresses_is_checked(settings):
    settings.RABBIT_URL = "amqp://guest:guest@one:5672,amqp://guest:guest@two:port"
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@one:15672,http://guest:guest@two:15672/api"
    found = check_settings(None)
    assert [message.id for message in found] == ["guardian.E030", "guardian.E002"]
    assert [message.msg for message in found] == [
        "RABBITMQ_MANAGEMENT_URL ends in /api (address 2 of 2).",
        "RABBIT_URL is not a valid URL (address 2 of 2).",
    ]


@pytest.mark.parametrize(
    ("wrong", "ids_"),
    [
        ({}, []),
        ({"OIDC_VOUCHED_GROUPS": ["builders"]}, []),
        ({"OIDC_CLIENT_ID": ""}, ["guardian.E019"]),
        ({"OIDC_CLIENT_SECRET": ""}, ["guardian.E019"]),
        ({"OIDC_ISSUER": "login.example.org"}, ["guardian.E002"]),
        ({"OIDC_ISSUER": "ldap://login.example.org"}, ["guardian.E002"]),
        ({"OIDC_ISSUER": "https://login.example.org/#x"}, ["guardian.E030"]),
    ],
)
def test_openid_connect_needs_an_issuer_a_client_id_and_a_secret(settings, wrong, ids_):
    good = {
        "OIDC_ISSUER": "https://login.example.org",
        "OIDC_CLIENT_ID": "guardian",
        "OIDC_CLIENT_SECRET": "word",
    }
    for name, value in {**good, **wrong}.items():
        setattr(settings, name, value)
    assert reported_ids() == ids_


@pytest.fixture
def removed_setting(monkeypatch):
    """Return the name of a removed setting, which is unset after the test."""
    monkeypatch.setitem(checks.REMOVED_SETTINGS, "GUARDIAN_OLD", "Set GUARDIAN_NEW instead.")
    monkeypatch.setenv("GUARDIAN_OLD", "")
    del os.environ["GUARDIAN_OLD"]
    return "GUARDIAN_OLD"


def test_a_removed_setting_is_refused_and_names_its_replacement(removed_setting):
    assert reported_ids() == []
    os.environ[removed_setting] = ""
    [message] = check_settings(None)
    assert message.id == "guardian.E021"
    assert (message.msg, message.hint) == ("GUARDIAN_OLD was removed.", "Delete it. Set GUARDIAN_NEW instead.")


def test_a_removed_setting_in_the_env_file_is_refused(removed_setting, tmp_path):
    (tmp_path / ".env").write_text(f"{removed_setting}=true\n")
    environment.load(tmp_path / ".env")
    assert reported_ids() == ["guardian.E021"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GUARDIAN_MAX_QUEUE_LENGHT", "Did you mean GUARDIAN_MAX_QUEUE_LENGTH?"),
        ("RABBIT_URI", "Did you mean RABBIT_URL?"),
        ("RABBIT_THREDS", "Did you mean RABBIT_THREADS?"),
        ("GUARDIAN_COLOUR", "See .env.example for all settings."),
    ],
)
def test_an_unknown_name_with_a_prefix_of_the_settings_is_warned_about(monkeypatch, name, hint):
    monkeypatch.setenv("GUARDIAN_SERVICE_HOST", "10.0.0.7")  # set by Kubernetes
    monkeypatch.setenv("RABBIT_PREFETCH", "5")  # a setting of the command consume
    monkeypatch.setenv(name, "1")
    [message] = check_settings(None)
    assert (message.id, message.hint) == ("guardian.W008", hint)
    assert message.msg == f"{name} is not a setting, so it has no effect."


@pytest.mark.parametrize("name", ["RABBITMQ_MANAGEMENT_URL", "SENTRY_DSN"])
def test_messages_contain_no_password(settings, name):
    setattr(settings, name, "ftp://guest:secret-word@rabbit")
    assert len(messages := check_settings(None)) == 1
    assert "secret-word" not in f"{messages[0].msg} {messages[0].hint}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {
            "SECRET_KEY": ("", "SECRET_KEY is empty"),
            "GUARDIAN_WARN_QUEUE_LENGTH": ("9000", "is not below"),
            "GUARDIAN_IGNORED_QUEUES": ("[", "not a regular expression"),
            "CELERY_BROKER_URL": ("amqp://guest@rabbit:5672", "the RabbitMQ that Guardian guards"),
            "GUARDIAN_MAX_QUEUE_LENGTH": ("many", "GUARDIAN_MAX_QUEUE_LENGTH can't be read"),
            "DATABASE_URL": ("guardian.sqlite3", "DATABASE_URL can't be read"),
            "EMAIL_URL": ("mail.example.org", "EMAIL_URL can't be read"),
            "LOG_LEVEL": ("loud", "LOG_LEVEL can't be read"),
            "GUARDIAN_BASE_URL": ("http://[x", "GUARDIAN_BASE_URL can't be read"),
        },
        {"DATABASE_URL": ("postgres://u:p@host:port/x", "DATABASE_URL can't be read")},
    ],
    ids=["nine", "one"],
)
def test_manage_check_fails_with_the_reasons(wrong):
    environment = {
        **os.environ,
        "RABBIT_URL": "amqp://guest:guest@rabbit:5672",
        "RABBITMQ_MANAGEMENT_URL": "http://guest:guest@rabbit:15672",
        **{name: value for name, (value, _) in wrong.items()},
    }
    answer = run_python(environment, "manage.py", "check")
    assert answer.returncode == 1
    assert [expected for _, expected in wrong.values() if expected not in answer.stderr] == []
    assert "Traceback" not in answer.stderr
