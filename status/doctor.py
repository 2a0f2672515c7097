"""The checks of ``manage.py doctor``: everything that Guardian needs, each with a finding and advice.

The checks change nothing and send no mail. They run in parallel, and all end within ``TIMEOUT_SECONDS``.
"""

import ipaddress
import re
import shlex
import smtplib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import amqp
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import get_connection
from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now
from django.http.request import split_domain_port, validate_host
from django.utils import timezone
from requests import RequestException

from accounts.models import Owner
from accounts.signing_in import signin
from agents.models import Consumer, EventSubscription
from agents.sweeps import registered
from core.addresses import is_loopback, split_address
from core.certificates import store_error
from core.checks import OLD_DATABASE_REMEDY, is_older_than_version_1
from core.masking import mask_secrets
from core.models import Lease
from message_store.cassandra.settings import replication
from message_store.store import StoreUnavailable, store
from queues.guard import pass_run
from rabbit import checkup, snapshot
from rabbit.addresses import are_two, split_addresses, two_clusters, without_credentials
from rabbit.management import BrokerError, Management, NotOnBroker, Refused, Row
from rabbit.names import readable
from rabbit.permissions import allows
from rabbit.threads import ContextThreadPool
from status import facts, rules
from status.facts import Measurement
from status.rules import Level, Rule, Verdict

TIMEOUT_SECONDS = 18.0
"""For all checks together."""

BROKER_SECONDS = 4.0
"""The timeout of each answer of the management API."""

OLDEST_RABBITMQ = (3, 10)
TRANSIENT_QUEUES = "transient_nonexcl_queues"
ON_THIS_MACHINE = "this machine"
AMQP = ("amqp", "amqps", "pyamqp")
SAMPLE_NAMES = ("queue/alice/builds", "subscription_0_order", "consumer_0", "amq.default", "exchange/alice/events")
"""A name of each kind. The permissions of Guardian's account must match all of them on each guarded vhost."""


class Status(StrEnum):
    """The status of a finding. With a warning, Guardian works; with a problem, it does not work correctly."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """The result of a check. ``advice`` is empty if the status is OK."""

    name: str
    status: Status
    found: str
    advice: str = ""


Findings = Iterator[Finding]

STATUSES = {Level.OK: Status.OK, Level.WARNING: Status.WARNING, Level.CRITICAL: Status.PROBLEM}


def _findings(verdicts: Iterable[Verdict]) -> Findings:
    """Yield a finding for each wrong verdict, and one for each rule without a wrong verdict."""
    by_rule: dict[Rule, list[Verdict]] = {}
    for verdict in verdicts:
        by_rule.setdefault(verdict.rule, []).append(verdict)
    for same in by_rule.values():
        known = [verdict for verdict in same if verdict.value is not None]
        highest = sorted(known, key=lambda verdict: verdict.value or 0)[-1:]
        for verdict in [verdict for verdict in known if verdict.is_wrong] or highest:
            yield _finding(verdict)


def _finding(verdict: Verdict, name: str = "") -> Finding:
    advice = f"{verdict.next_step} See docs/operators.md#{verdict.rule.runbook}." if verdict.is_wrong else ""
    return Finding(name or verdict.rule.name, STATUSES[verdict.level], verdict.sentence, advice)


def examine() -> list[Finding]:
    """Run all checks, and return their findings. Raise no errors."""
    parts = (
        ("settings", _settings),
        ("database", _database),
        ("task queue", _task_queue),
        ("broker", _broker),
        ("broker over AMQP", _broker_over_amqp),
        ("broker addresses", _broker_addresses),
        ("broker clock", _broker_clock),
        ("message store", _message_store),
        ("mail server", _mail_server),
        ("single sign-on", _single_sign_on),
    )
    checks = [_Check(name, check) for name, check in parts]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for check in checks:
        check.start()
    found = [finding for check in checks for finding in check.found_by(deadline)]
    return [_without_passwords(_with_certificate_advice(finding)) for finding in found]


class _Check(threading.Thread):
    """Checks one part. If it takes too long, it is abandoned."""

    def __init__(self, part: str, check: Callable[[], Findings]) -> None:
        super().__init__(daemon=True)
        self._part = part
        self._check = check
        self._found: list[Finding] = []

    def run(self) -> None:
        try:
            for finding in self._check():
                self._found.append(finding)
        except Exception as error:  # one failed check must not hide the findings of others
            found = f"the check failed: {type(error).__name__}: {_words(error)}"
            advice = "Look at the other findings first; one of them may be the cause."
            self._found.append(Finding(self._part, Status.PROBLEM, found, advice))
        finally:
            connection.close()

    def found_by(self, deadline: float) -> list[Finding]:
        """Return the findings until the deadline, with another one if the check has not finished."""
        self.join(max(deadline - time.monotonic(), 0))
        found = list(self._found)
        if self.is_alive():
            advice = "Check that it runs, and that no firewall blocks it."
            found.append(Finding(self._part, Status.PROBLEM, f"no answer within {TIMEOUT_SECONDS:g} s", advice))
        return found


# Settings and this machine


def _settings() -> Findings:
    messages = [message for message in run_checks() if str(message.id).startswith("guardian.")]
    for message in messages:
        status = Status.PROBLEM if message.level >= ERROR else Status.WARNING
        yield Finding("settings", status, str(message.msg), str(message.hint or "See .env.example."))
    if not messages:
        yield Finding("settings", Status.OK, "they are valid, as far as Guardian can check them alone")
    yield _debug()
    yield from _secret_key()
    yield from _base_url()
    yield from _certificates()
    yield _var_folder()


def _debug() -> Finding:
    if settings.DEBUG:
        advice = "Turn DEBUG off in production: with it, error pages show the settings to everybody."
        return Finding("debug", Status.WARNING, "DEBUG is on", advice)
    return Finding("debug", Status.OK, "DEBUG is off")


def _secret_key() -> Findings:
    try:
        key = settings.SECRET_KEY
    except ImproperlyConfigured:
        return  # it is empty, which the findings of "settings" report
    if settings.DEBUG or (len(key) >= 40 and len(set(key)) > 5):
        yield Finding("secret key", Status.OK, "SECRET_KEY is set")
    else:
        advice = "Set it to a random text of 40 characters or more. Anybody who guesses it can sign in as any user."
        yield Finding("secret key", Status.WARNING, "SECRET_KEY is short, or has few different characters", advice)


def _base_url() -> Findings:
    url = urlsplit(settings.GUARDIAN_BASE_URL)
    if not url.hostname:
        return  # the findings of "settings" report it
    if not _is_allowed(split_domain_port(url.netloc)[0]):
        advice = "Add the host to ALLOWED_HOSTS, or leave ALLOWED_HOSTS out. Until then each request gets a 400."
        found = f"ALLOWED_HOSTS lacks {url.hostname}, the host of GUARDIAN_BASE_URL"
        yield Finding("address", Status.PROBLEM, found, advice)
        return
    is_local = is_loopback(url.hostname)
    if settings.DEBUG or (url.scheme == "https" and not is_local):
        yield Finding("address", Status.OK, f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}")
    elif is_local:
        found = f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}, which works on this machine only"
        advice = "Set it to the address that people use: links in mails begin with it."
        yield Finding("address", Status.WARNING, found, advice)
    else:
        found = f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}: passwords and tokens are sent unencrypted"
        advice = (
            "Run Guardian behind a proxy that terminates TLS, and set an https:// address. This also turns on "
            "redirects, HSTS and Secure cookies."
        )
        yield Finding("address", Status.WARNING, found, advice)


def _is_allowed(host: str) -> bool:
    """Return whether Django accepts requests for this host."""
    return validate_host(host, settings.ALLOWED_HOSTS) or (settings.DEBUG and not settings.ALLOWED_HOSTS)


def _certificates() -> Findings:
    if error := store_error():
        advice = (
            "Name a readable file of certificates in PEM format, or unset it. Until then no certificate is trusted."
        )
        yield Finding("certificates", Status.PROBLEM, error, advice)


def _var_folder() -> Finding:
    folder = Path(settings.VAR_DIR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        found = f"GUARDIAN_VAR_DIR ({folder}) can't be written: {error.strerror}"
        advice = "Make the folder writable for the account that runs Guardian, and free space on its disk."
        return Finding("folder", Status.PROBLEM, found, advice)
    return Finding("folder", Status.OK, f"GUARDIAN_VAR_DIR ({folder}) can be written")


# The database, and the measurements in it


def _database() -> Findings:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            yield _database_version()
            if connection.vendor == "sqlite":
                cursor.execute("PRAGMA journal_mode")
                yield _journal(str(cursor.fetchone()[0]))
            else:
                before = timezone.now()
                cursor.execute("SELECT clock_timestamp()")
                yield _clock("database clock", cursor.fetchone()[0], before)
        pending = _pending_migrations()
        yield pending
        if pending.status is Status.OK:
            yield from _rows()
    except Error as error:
        advice = "Check that it runs, and the account and the password in DATABASE_URL. Nothing works without it."
        yield Finding("database", Status.PROBLEM, f"it can't be used: {str(error).strip()}", advice)


def _database_version() -> Finding:
    version = ".".join(map(str, connection.get_database_version()))
    if connection.vendor == "sqlite":
        found = f"SQLite {version}, {connection.settings_dict['NAME']}"
        if not settings.DEBUG:
            advice = "Use PostgreSQL for several workers or machines: SQLite has one writer at a time, on one machine."
            return Finding("database", Status.WARNING, found, advice)
        return Finding("database", Status.OK, found)
    return Finding("database", Status.OK, f"PostgreSQL {version} on {connection.settings_dict['HOST'] or 'a socket'}")


def _journal(mode: str) -> Finding:
    if mode == "wal":
        return Finding("database journal", Status.OK, "WAL: readers and the writer don't wait for each other")
    advice = "Put its folder on a local disk and make it writable: WAL doesn't work on a network's disk."
    return Finding("database journal", Status.PROBLEM, f"the journal is '{mode}' instead of WAL", advice)


def _pending_migrations() -> Finding:
    if is_older_than_version_1(connection):
        return Finding(
            "migrations", Status.PROBLEM, "this database was created before version 1 of Guardian", OLD_DATABASE_REMEDY
        )
    executor = MigrationExecutor(connection)
    pending = [migration for migration, _ in executor.migration_plan(executor.loader.graph.leaf_nodes())]
    if not pending:
        return Finding("migrations", Status.OK, "none is pending")
    names = ", ".join(str(migration) for migration in pending[:3])
    found = f"{len(pending)} pending: {names}{', …' if len(pending) > 3 else ''}"
    return Finding("migrations", Status.PROBLEM, found, "Run manage.py migrate. Checks of the rows were skipped.")


def _rows() -> Findings:
    now = timezone.now()
    yield from _findings(facts.measure_guardian(now).verdicts())
    yield _operators()
    yield from _findings(one.verdict for one in _leases(now))


def _operators() -> Finding:
    if Owner.objects.filter(is_staff=True, is_active=True).exists():
        return Finding("operators", Status.OK, "an operator can sign in")
    advice = "Run manage.py create_owner you@example.org --operator, and manage.py login_link you@example.org."
    return Finding("operators", Status.WARNING, "no owner is an operator, so nobody can use /admin/", advice)


def _leases(now: datetime) -> Iterator[Measurement]:
    """Yield the time since each unreleased lease expired; 0: there is none."""
    expired = Lease.objects.filter(holder__isnull=False, expires_at__lt=Now()).order_by("expires_at")
    yield Measurement(rules.LEASE, 0)
    for lease in expired[:5]:
        yield Measurement(rules.LEASE, (now - lease.expires_at).total_seconds(), {"lease": lease.name})


# The task queue


def _task_queue() -> Findings:
    several = settings.CELERY_BROKER_URL.split(";")
    if not all(map(split_address, several)):
        return  # the findings of "settings" report it
    url = urlsplit(several[0])
    if url.scheme == "memory":
        advice = (
            "Set CELERY_BROKER_URL to redis://host:6379/0. On one machine you can leave it out: a folder is enough."
        )
        found = "CELERY_BROKER_URL is memory://, which other processes can't see, so workers get no tasks"
        yield Finding("task queue", Status.PROBLEM, found, advice)
        return
    try:
        facts.connect_to_task_queue()
    except Exception as error:  # transports raise errors of any type
        advice = "Check that it runs, and CELERY_BROKER_URL. Without it workers get no tasks, and passes stop."
        yield Finding("task queue", Status.PROBLEM, f"it does not answer: {_words(error)}", advice)
        return
    is_folder = url.scheme == "filesystem"
    where = "a folder on this machine" if is_folder else f"{url.scheme} on {url.hostname or ON_THIS_MACHINE}"
    yield Finding("task queue", Status.OK, where)
    yield _is_not_guarded(several[0])


def _is_not_guarded(url: str) -> Finding:
    name = "task queue apart"
    # The findings of "settings" report an invalid address.
    guarded_at = split_addresses(settings.RABBIT_URL)
    if urlsplit(url).scheme not in AMQP or not guarded_at or None in map(split_address, guarded_at):
        return Finding(name, Status.OK, "it is not the guarded RabbitMQ")
    advice = "Use Redis. Under a resource alarm the guarded broker blocks all publishers, including Guardian."
    same = _addresses(url) & set().union(*map(_addresses, guarded_at))
    if same:
        found = f"it is the guarded RabbitMQ: both are at {min(same)}"
        return Finding(name, Status.PROBLEM, found, advice)
    try:
        tasks, guarded = checkup.server_properties(url), checkup.server_properties(_first_answering(guarded_at))
    except OSError as error:
        return Finding(name, Status.WARNING, f"it could not be compared with the guarded RabbitMQ: {error}", advice)
    if tasks.cluster and tasks.cluster == guarded.cluster:
        found = f"it is the guarded RabbitMQ: both have the cluster name '{tasks.cluster}'"
        advice += " If these are two clusters, give them different names: rabbitmqctl set_cluster_name NAME"
        return Finding(name, Status.PROBLEM, found, advice)
    return Finding(name, Status.OK, f"it is another RabbitMQ ('{tasks.cluster}') than the guarded one")


def _addresses(url: str) -> set[str]:
    """Return the IP addresses and the port of a URL. All loopback addresses are the same."""
    parts = urlsplit(url)
    port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
    return {f"{ON_THIS_MACHINE if ipaddress.ip_address(one).is_loopback else one}, port {port}" for one in found}


# The broker


def _broker() -> Findings:
    if not settings.RABBITMQ_MANAGEMENT_URL:
        return  # the findings of "settings" report it
    try:
        management = Management(settings.RABBITMQ_MANAGEMENT_URL, read_timeout=BROKER_SECONDS)
    except ValueError as error:
        advice = "Write it as http://user:password@host:15672."
        reason = str(error).partition("; write ")[0]  # the advice repeats the rest
        yield Finding("broker", Status.PROBLEM, f"RABBITMQ_MANAGEMENT_URL can't be used: {reason}", advice)
        return
    with closing(management):
        account, answer = facts.time_answer(management.whoami, BROKER_SECONDS)
        if account is None:
            yield _finding(answer.verdict)
            return
        try:
            overview = management.overview()
            version = overview["rabbitmq_version"]
            if answer.verdict.is_wrong:
                yield _finding(answer.verdict)
            else:
                cluster = overview.get("cluster_name")
                yield Finding("broker", Status.OK, f"RabbitMQ {version} answers, cluster '{cluster}'")
            yield _version(version)
            tag = _tag(account.name, account.tags)
            yield tag
            if management.is_rewritten():
                found = "a proxy before the broker decodes %2F in addresses, so that a request can reach another queue"
                advice = (
                    "Set up the proxy to pass addresses on unchanged. In nginx, use proxy_pass without a path and "
                    "merge_slashes off; or connect without the proxy."
                )
                yield Finding("broker address", Status.PROBLEM, found, advice)
            if tag.status is Status.OK:
                yield from _as_administrator(management, overview, account.name)
        except BrokerError as error:
            yield Finding("broker", Status.PROBLEM, str(error), rules.BROKER.next_step)


def _as_administrator(management: Management, overview: Row, account: str) -> Findings:
    yield _statistics(overview)
    yield from _transient_queues(management)
    agents, has_agents = _agents()
    if "listeners" in overview:  # it is missing if the broker collects no statistics
        yield _stomp(overview, has_agents)
    running, _ = snapshot.members(management)
    stopped = snapshot.stopped_vhosts(management, running)
    existing = {vhost.name: vhost.name not in stopped for vhost in management.vhosts()}
    guarded = pass_run.guarded_vhosts(agents)
    yield _vhosts(existing, guarded, agents)
    vhosts = [vhost for vhost in guarded or existing if vhost in existing]
    yield _permissions(management, account, vhosts, agents)
    over_amqp = split_address(next(iter(split_addresses(settings.RABBIT_URL)), ""))
    if over_amqp is not None and over_amqp.hostname:
        amqp_account = unquote(over_amqp.username or "guest")
        if amqp_account != account:
            yield _permissions(management, amqp_account, vhosts, agents, over="AMQP")
    yield from _findings(one.verdict for node in facts.fetch_nodes(management) for one in facts.measure_node(node))


def _version(text: str) -> Finding:
    oldest = ".".join(map(str, OLDEST_RABBITMQ))
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_RABBITMQ:
        advice = f"Upgrade to RabbitMQ {oldest} or later: older versions have no cheap complete list of queues."
        return Finding("broker version", Status.PROBLEM, f"RabbitMQ {text} is not supported", advice)
    return Finding("broker version", Status.OK, f"RabbitMQ {text}; {oldest} and later are supported")


def _tag(account: str, tags: Iterable[str]) -> Finding:
    if "administrator" in tags:
        return Finding("broker account", Status.OK, f"'{account}' is an administrator")
    found = f"'{account}' doesn't have the administrator tag, and sees only a part of the queues"
    advice = f"Run: rabbitmqctl set_user_tags {_quoted(account)} administrator"
    return Finding("broker account", Status.PROBLEM, found, advice)


def _statistics(overview: Row) -> Finding:
    if overview.get("disable_stats") is True:
        advice = (
            "Remove management.disable_stats and management_agent.disable_metrics_collector from rabbitmq.conf, and do "
            "not set deprecated_features.permit.management_metrics_collection to false. Without statistics Guardian "
            "knows lengths, but not consumers, connections, memory, disk and plugins."
        )
        return Finding("broker statistics", Status.WARNING, "the broker collects no statistics", advice)
    return Finding("broker statistics", Status.OK, "the broker collects statistics")


def _transient_queues(management: Management) -> Findings:
    try:
        denied = management.denied_features()
    except BrokerError:  # such as a proxy that does not pass on this path
        return
    if TRANSIENT_QUEUES in denied:
        found = "the broker refuses to declare queues that are neither durable nor exclusive; Guardian declares none"
        yield Finding("transient queues", Status.OK, found)


def _stomp(overview: Row, has_agents: bool) -> Finding:
    protocols = {str(listener.get("protocol")) for listener in overview.get("listeners") or ()}
    stomp = sorted(protocol for protocol in protocols if "stomp" in protocol)
    if stomp:
        return Finding("broker plugins", Status.OK, f"management; for agents {', '.join(stomp)}")
    found = "neither rabbitmq_web_stomp nor rabbitmq_stomp is enabled, so no agent can connect"
    advice = "Run: rabbitmq-plugins enable rabbitmq_web_stomp. Without agents you don't need it."
    return Finding("broker plugins", Status.PROBLEM if has_agents else Status.WARNING, found, advice)


def _agents() -> tuple[set[str], bool]:
    """Return the agents' vhosts, and whether agents registered queues; none if the database can't be read."""
    try:
        has_agents = EventSubscription.objects.exists() or Consumer.objects.exists()
        return set(registered.agent_vhosts()), has_agents
    except Error:
        return set(), False


def _vhosts(existing: dict[str, bool], guarded: list[str] | None, agents: set[str]) -> Finding:
    wanted = list(dict.fromkeys([*(guarded or ()), settings.GUARDIAN_PULSE_VHOST]))
    missing = [vhost for vhost in wanted if vhost not in existing]
    if by_setting := [vhost for vhost in missing if vhost not in agents]:
        found = f"not on the broker: {_names(by_setting)}"
        advice = "Correct GUARDIAN_VHOSTS or GUARDIAN_PULSE_VHOST, or run: rabbitmqctl add_vhost NAME"
        return Finding("vhosts", Status.PROBLEM, found, advice)
    if missing:
        advice = "They belong to agents. Passes create them again; manage.py cleanup_orphan_queues does it now."
        return Finding("vhosts", Status.WARNING, f"not on the broker: {_names(missing)}", advice)
    if stopped := [vhost for vhost in guarded or existing if not existing[vhost]]:
        advice = "Start the stopped nodes, or run: rabbitmqctl restart_vhost. Until then lists lack some of the queues."
        return Finding("vhosts", Status.WARNING, f"not running on every node: {_names(stopped)}", advice)
    number = len(existing) if guarded is None else len(guarded)
    return Finding("vhosts", Status.OK, f"all {number} guarded vhosts exist and run")


def _permissions(
    management: Management, account: str, vhosts: list[str], agents: set[str], over: str = "HTTP"
) -> Finding:
    name = "permissions" if over == "HTTP" else f"permissions over {over}"
    try:
        granted = management.permissions_of(account)
    except NotOnBroker:
        advice = "Check its permissions where they are kept, such as in LDAP. Guardian needs all on the guarded vhosts."
        return Finding(name, Status.WARNING, f"'{account}' is none of RabbitMQ's own accounts", advice)
    lacking = [
        vhost
        for vhost in dict.fromkeys([*vhosts, *(vhost for vhost in agents if vhost in granted)])
        if vhost not in granted or not all(allows(one, sample) for one in granted[vhost] for sample in SAMPLE_NAMES)
    ]
    if not lacking:
        return Finding(name, Status.OK, f"'{account}' may do everything on the guarded vhosts")
    effect = "queues there are listed, but can't be deleted" if over == "HTTP" else "events can't be published there"
    advice = f"Run: rabbitmqctl set_permissions -p {_quoted(lacking[0])} {_quoted(account)} '.*' '.*' '.*'"
    return Finding(name, Status.PROBLEM, f"'{account}' may not do everything on {_names(lacking)}: {effect}", advice)


def _broker_over_amqp() -> Findings:
    name = "broker over AMQP"
    urls = split_addresses(settings.RABBIT_URL)
    parts = [split_address(url) for url in urls]
    if not urls or any(one is None or one.scheme not in ("amqp", "amqps") for one in parts):
        return  # the findings of "settings" report it
    url = _first_answering(urls)
    try:
        server = checkup.server_properties(url)
        vhosts = (pass_run.guarded_vhosts(_agents()[0]) or [settings.GUARDIAN_PULSE_VHOST])[:20]
        refused = {vhost: reason for vhost in vhosts if (reason := _refused(url, vhost))}
    except OSError as error:
        advice = "Check RABBIT_URL, its port (5672, or 5671 for amqps) and the firewall. Events can't be published."
        yield Finding(name, Status.PROBLEM, f"it does not answer: {error or 'no answer in time'}", advice)
        return
    if refused:
        reason = next(iter(refused.values()))
        advice = (
            "Check the account and the password in RABBIT_URL, and its permissions: RabbitMQ 4.3 answers a passive "
            "declare only to an account with a permission on the queue. Lengths are less exact without."
        )
        yield Finding(name, Status.PROBLEM, f"Guardian can't declare queues in {_names(refused)}: {reason}", advice)
        return
    yield Finding(name, Status.OK, f"{server.product} {server.version} accepts Guardian's login")
    cluster = _cluster_by_http()
    if cluster and server.cluster and are_two(cluster, server.cluster):
        found = f"RABBIT_URL leads to the cluster '{server.cluster}', and RABBITMQ_MANAGEMENT_URL to '{cluster}'"
        yield Finding("one broker", Status.PROBLEM, found, "Set both to addresses of the guarded broker.")


def _first_answering(urls: list[str]) -> str:
    """Return the first of several addresses that speaks AMQP, or the last."""
    for url in urls[:-1]:
        with suppress(OSError):
            checkup.server_properties(url)
            return url
    return urls[-1]


def _broker_addresses() -> Findings:
    """Check each address, if there are several."""
    checks: tuple[tuple[str, Callable[[str], str]], ...] = (
        (settings.RABBITMQ_MANAGEMENT_URL, _cluster_at),
        (settings.RABBIT_URL, _cluster_over_amqp),
    )
    for setting, cluster_at in checks:
        urls = split_addresses(setting)
        if len(urls) < 2:
            continue
        with ContextThreadPool(len(urls)) as threads:
            found = dict(zip(urls, threads.map(partial(_address, cluster_at=cluster_at), urls), strict=True))
        yield from (finding for finding, _ in found.values())
        clusters = [(url, cluster) for url, (_, cluster) in found.items() if cluster]
        for (url, cluster), (other, another) in combinations(clusters, 2):
            if are_two(cluster, another):
                advice = "Guardian uses only one of them. Write only addresses of nodes of the guarded cluster."
                yield Finding("one cluster", Status.PROBLEM, two_clusters(url, other), advice)
                break
        users = sorted({unquote(urlsplit(url).username or "guest") for url in urls})
        if len(users) > 1:
            advice = "Use one account in all addresses. Otherwise Guardian's permissions depend on the node."
            yield Finding(
                "one account", Status.WARNING, f"the addresses have several accounts: {_names(users)}", advice
            )


def _address(url: str, cluster_at: Callable[[str], str]) -> tuple[Finding, str]:
    """Check one of several addresses, and return the finding and its cluster's id or name; empty: there is none."""
    name = without_credentials(url)
    try:
        cluster = cluster_at(url)
    except (Refused, amqp.AMQPError) as error:
        advice = "Check the account, its tag and the password in this address. Guardian uses the others until then."
        return Finding("broker address", Status.PROBLEM, f"{name} can't be used: {error}", advice), ""
    except (BrokerError, ValueError, OSError) as error:
        advice = "Start the node, or remove the address if the node is gone. Guardian uses the others until then."
        found = f"{name} does not answer: {_words(error) or 'no answer in time'}"
        return Finding("broker address", Status.WARNING, found, advice), ""
    return Finding("broker address", Status.OK, f"{name} answers and accepts the login"), cluster


def _cluster_at(url: str) -> str:
    with closing(Management(url, read_timeout=BROKER_SECONDS)) as management:
        snapshot.require_administrator(management)
        return management.cluster_ids()[url]


def _cluster_over_amqp(url: str) -> str:
    cluster = checkup.server_properties(url).cluster
    checkup.check_vhost(url, settings.GUARDIAN_PULSE_VHOST)
    return cluster


def _refused(url: str, vhost: str) -> str:
    """Return why Guardian can't declare a queue passively in a vhost; empty: it can."""
    try:
        checkup.check_vhost(url, vhost)
    except amqp.AMQPError as error:
        return str(error)
    return ""


def _cluster_by_http() -> str:
    """Return the cluster's name by the management API; empty: no answer, which the check of the broker reports."""
    try:
        with closing(Management(settings.RABBITMQ_MANAGEMENT_URL, read_timeout=BROKER_SECONDS)) as management:
            return str(management.overview().get("cluster_name") or "")
    except (BrokerError, ValueError):
        return ""


def _broker_clock() -> Findings:
    try:
        with closing(Management(settings.RABBITMQ_MANAGEMENT_URL, read_timeout=BROKER_SECONDS)) as management:
            before = timezone.now()
            at_broker = management.clock()
    except (BrokerError, ValueError):
        return  # the check of the broker reports it
    if at_broker is not None:
        yield _clock("broker clock", at_broker, before)


def _clock(name: str, theirs: datetime, before: datetime) -> Finding:
    """Compare a clock with this machine's, which showed ``before`` before the request."""
    after = timezone.now()
    # The broker's time is in whole seconds, so it may be one second behind.
    difference = max(before - theirs - timedelta(seconds=1), theirs - after, timedelta(0))
    way = "behind" if theirs < before else "ahead of"
    return _finding(Measurement(rules.CLOCK, difference.total_seconds(), {"way": way}).verdict, name)


# Mail


def _mail_server() -> Findings:
    if not settings.EMAIL_BACKEND.endswith("smtp.EmailBackend"):
        found = f"no mail server is set; mails go to {settings.EMAIL_BACKEND.split('.')[-2]}"
        status = Status.OK if settings.DEBUG else Status.WARNING
        advice = "" if settings.DEBUG else "Set EMAIL_URL: without it nobody is notified."
        yield Finding("mail server", status, found, advice)
        return
    where = f"{settings.EMAIL_HOST}, port {settings.EMAIL_PORT}"
    try:
        server = get_connection(timeout=5)
        server.open()
        server.close()
    except smtplib.SMTPAuthenticationError as error:
        found = f"{where}: it refuses the account ({error.smtp_code})"
        yield Finding("mail server", Status.PROBLEM, found, "Check the account and the password in EMAIL_URL.")
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        advice = "Check that it runs, and EMAIL_URL. Guardian keeps mails and tries to send them for a day."
        yield Finding("mail server", Status.PROBLEM, f"{where}: {_words(error) or 'no answer in time'}", advice)
    else:
        login = "and accepts the account" if settings.EMAIL_HOST_USER else "without an account"
        yield Finding("mail server", Status.OK, f"{where} answers, {login}")


# The message store


def _message_store() -> Findings:
    name = "message store"
    if settings.MESSAGE_STORE != "cassandra":
        return
    try:
        # The import takes a while, and most installations don't need it.
        from message_store.cassandra.checkup import examine

        cluster = examine(wait=2)
    except StoreUnavailable as error:
        advice = "Start the cluster, or check the settings that begin with CASSANDRA_. Until then requests get 503."
        yield Finding(name, Status.PROBLEM, str(error), advice)
        return
    nodes = f"Cassandra {cluster.version}, {cluster.up} of {cluster.up + len(cluster.down)} nodes answer"
    if cluster.down:
        advice = f"Start {', '.join(cluster.down)}. After more than a day without a node, repair it first."
        yield Finding(name, Status.WARNING, nodes, advice)
    else:
        yield Finding(name, Status.OK, nodes)
    wanted, actual = replication(), cluster.replication
    if actual != wanted:
        found = f"the keyspace {settings.CASSANDRA_KEYSPACE} has the replicas {actual}, CASSANDRA_REPLICATION {wanted}"
        yield Finding(name, Status.PROBLEM, found, "Run manage.py message_store_schema, which says what to do.")
    delay = store().delay
    found = f"the clocks of the nodes differ by {cluster.clock_difference:.3f} s"
    if delay and cluster.clock_difference > delay / 3:
        advice = f"Synchronize them by NTP. Above {delay / 3:.1f} s, a third of the delay, readers may miss messages."
        yield Finding(name, Status.PROBLEM, found, advice)
    else:
        yield Finding(name, Status.OK, found)


# Single sign-on


def _single_sign_on() -> Findings:
    if not settings.OIDC_ISSUER:
        return
    try:
        signin.check_provider()
    except (RequestException, OAuth2Error) as error:
        advice = "Check OIDC_ISSUER, and that it answers. Until then people sign in by a code."
        yield Finding("single sign-on", Status.PROBLEM, f"{settings.OIDC_ISSUER} can't be used: {error}", advice)
    else:
        yield Finding("single sign-on", Status.OK, f"{settings.OIDC_ISSUER} answers")


# Words


UNKNOWN_AUTHORITY = re.compile(
    "self-signed certificate|unable to get (local )?issuer certificate|SSL error: certificate verify failed"
)
"""OpenSSL's reasons if a certificate's authority is not trusted, and PostgreSQL's text for all reasons."""

TRUST_ADVICE = (
    "Its certificate is from an authority that this machine doesn't trust. Add the authority's certificate to the "
    "system's store, or set SSL_CERT_FILE: see docs/operators.md#certificates-of-a-private-authority."
)


def _with_certificate_advice(finding: Finding) -> Finding:
    """Return a finding with the advice for certificates, if it is about one."""
    return finding._replace(advice=TRUST_ADVICE) if UNKNOWN_AUTHORITY.search(finding.found) else finding


def _names(names: Iterable[str]) -> str:
    names = list(names)
    first = ", ".join(f"'{readable(name)}'" for name in names[:5])
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first


def _quoted(name: str) -> str:
    """Return a broker's name quoted for a shell command."""
    return shlex.quote(readable(name))


def _words(error: Exception) -> str:
    """Return an error's text. A ValueError may quote a part of a password, so its text is replaced."""
    quotes_value = isinstance(error, ValueError) and not isinstance(error, OSError)
    return "it can't be read" if quotes_value else str(error)


def _without_passwords(finding: Finding) -> Finding:
    """Return a finding without secrets, which texts of errors may contain. The advice never contains any."""
    found = finding.found
    for password in sorted(_passwords(), key=len, reverse=True):
        # A short password may be a part of any word.
        pattern = re.escape(password) if len(password) > 5 else rf"(?<!\w){re.escape(password)}(?!\w)"
        found = re.sub(pattern, "…", found)
    found = readable(" ".join(mask_secrets(found).split()))
    return finding._replace(found=found)


def _passwords() -> set[str]:
    """Return the passwords in the settings, percent-encoded and decoded, except those that equal the user's name."""
    found = {str(settings.DATABASES["default"].get("PASSWORD") or ""), settings.EMAIL_HOST_PASSWORD or ""}
    of_broker = split_addresses(settings.RABBITMQ_MANAGEMENT_URL) + split_addresses(settings.RABBIT_URL)
    for url in (*of_broker, *settings.CELERY_BROKER_URL.split(";")):
        user, _, written = url.partition("://")[2].rpartition("@")[0].partition(":")
        if written != user:  # such as guest's, because findings contain the name
            found |= {written, unquote(written)}
    if settings.CASSANDRA_PASSWORD != settings.CASSANDRA_USER:
        found.add(settings.CASSANDRA_PASSWORD)
    return found - {""}
