"""What ``doctor`` checks of the broker over the management API."""

import re
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timedelta
from urllib.parse import unquote

from django.conf import settings
from django.db import Error
from django.utils import timezone

from agents.models import Consumer, EventSubscription
from agents.sweeps import registered
from core.addresses import split_address
from queues.guard import pass_run
from rabbit import snapshot
from rabbit.addresses import split_addresses
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.management import Management
from rabbit.permissions import allows
from rabbit.requests.sending import JSONObject
from status import facts, rules
from status.doctor.findings import (
    BROKER_SECONDS,
    SAMPLE_NAMES,
    Finding,
    Findings,
    Status,
    finding_of,
    findings_of,
    quoted_names,
    shell_quoted,
)
from status.facts import Measurement

OLDEST_RABBITMQ = (3, 10)
TRANSIENT_QUEUES = "transient_nonexcl_queues"


# The broker


def check_broker() -> Findings:
    """Check the broker, Guardian's user and its permissions."""
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
        user, answer = facts.time_answer(management.whoami, BROKER_SECONDS)
        if user is None:
            yield finding_of(answer.verdict)
            return
        try:
            overview = management.overview()
            version = overview["rabbitmq_version"]
            if answer.verdict.is_wrong:
                yield finding_of(answer.verdict)
            else:
                cluster = overview.get("cluster_name")
                yield Finding("broker", Status.OK, f"RabbitMQ {version} answers, cluster '{cluster}'")
            yield _version(version)
            tag = _tag(user.name, user.tags)
            yield tag
            if management.is_rewritten():
                found = "a proxy before the broker decodes %2F in addresses, so that a request can reach another queue"
                advice = (
                    "Set up the proxy to pass addresses on unchanged. In nginx, use proxy_pass without a path and "
                    "merge_slashes off; or connect without the proxy."
                )
                yield Finding("broker address", Status.PROBLEM, found, advice)
            if tag.status is Status.OK:
                yield from _as_administrator(management, overview, user.name)
        except BrokerError as error:
            yield Finding("broker", Status.PROBLEM, str(error), rules.BROKER.next_step)


def _as_administrator(management: Management, overview: JSONObject, user: str) -> Findings:
    yield _statistics(overview)
    yield from _transient_queues(management)
    agents, has_agents = agents_on_broker()
    if "listeners" in overview:  # it is missing if the broker collects no statistics
        yield _stomp(overview, has_agents)
    running, _ = snapshot.members(management)
    stopped = snapshot.stopped_vhosts(management, running)
    existing = {vhost.name: vhost.name not in stopped for vhost in management.vhosts()}
    guarded = pass_run.guarded_vhosts(agents)
    yield _vhosts(existing, guarded, agents)
    vhosts = [vhost for vhost in guarded or existing if vhost in existing]
    yield _permissions(management, user, vhosts, agents)
    over_amqp = split_address(next(iter(split_addresses(settings.RABBIT_URL)), ""))
    if over_amqp is not None and over_amqp.hostname:
        amqp_user = unquote(over_amqp.username or "guest")
        if amqp_user != user:
            yield _permissions(management, amqp_user, vhosts, agents, over="AMQP")
    yield from findings_of(one.verdict for node in facts.fetch_nodes(management) for one in facts.measure_node(node))


def _version(text: str) -> Finding:
    oldest = ".".join(map(str, OLDEST_RABBITMQ))
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_RABBITMQ:
        advice = f"Upgrade to RabbitMQ {oldest} or later: older versions have no cheap complete list of queues."
        return Finding("broker version", Status.PROBLEM, f"RabbitMQ {text} is not supported", advice)
    return Finding("broker version", Status.OK, f"RabbitMQ {text}; {oldest} and later are supported")


def _tag(user: str, tags: Iterable[str]) -> Finding:
    if "administrator" in tags:
        return Finding("broker user", Status.OK, f"'{user}' is an administrator")
    found = f"'{user}' doesn't have the administrator tag, and sees only a part of the queues"
    advice = f"Run: rabbitmqctl set_user_tags {shell_quoted(user)} administrator"
    return Finding("broker user", Status.PROBLEM, found, advice)


def _statistics(overview: JSONObject) -> Finding:
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


def _stomp(overview: JSONObject, has_agents: bool) -> Finding:
    protocols = {str(listener.get("protocol")) for listener in overview.get("listeners") or ()}
    stomp = sorted(protocol for protocol in protocols if "stomp" in protocol)
    if stomp:
        return Finding("broker plugins", Status.OK, f"management; for agents {', '.join(stomp)}")
    found = "neither rabbitmq_web_stomp nor rabbitmq_stomp is enabled, so no agent can connect"
    advice = "Run: rabbitmq-plugins enable rabbitmq_web_stomp. Without agents you don't need it."
    return Finding("broker plugins", Status.PROBLEM if has_agents else Status.WARNING, found, advice)


def agents_on_broker() -> tuple[set[str], bool]:
    """Return the agents' vhosts, and whether agents registered queues; none if the database can't be read."""
    try:
        has_agents = EventSubscription.objects.exists() or Consumer.objects.exists()
        return set(registered.vhosts()), has_agents
    except Error:
        return set(), False


def _vhosts(existing: dict[str, bool], guarded: list[str] | None, agents: set[str]) -> Finding:
    wanted = list(dict.fromkeys([*(guarded or ()), settings.GUARDIAN_PULSE_VHOST]))
    missing = [vhost for vhost in wanted if vhost not in existing]
    if by_setting := [vhost for vhost in missing if vhost not in agents]:
        found = f"not on the broker: {quoted_names(by_setting)}"
        advice = "Correct GUARDIAN_VHOSTS or GUARDIAN_PULSE_VHOST, or run: rabbitmqctl add_vhost NAME"
        return Finding("vhosts", Status.PROBLEM, found, advice)
    if missing:
        advice = "They belong to agents. Passes create them again; manage.py cleanup_orphan_queues does it now."
        return Finding("vhosts", Status.WARNING, f"not on the broker: {quoted_names(missing)}", advice)
    if stopped := [vhost for vhost in guarded or existing if not existing[vhost]]:
        advice = "Start the stopped nodes, or run: rabbitmqctl restart_vhost. Until then lists lack some of the queues."
        return Finding("vhosts", Status.WARNING, f"not running on every node: {quoted_names(stopped)}", advice)
    number = len(existing) if guarded is None else len(guarded)
    return Finding("vhosts", Status.OK, f"all {number} guarded vhosts exist and run")


def _permissions(management: Management, user: str, vhosts: list[str], agents: set[str], over: str = "HTTP") -> Finding:
    name = "permissions" if over == "HTTP" else f"permissions over {over}"
    try:
        granted = management.permissions_of(user)
    except NotOnBroker:
        advice = "Check its permissions where they are kept, such as in LDAP. Guardian needs all on the guarded vhosts."
        return Finding(name, Status.WARNING, f"'{user}' is none of RabbitMQ's own users", advice)
    lacking = [
        vhost
        for vhost in dict.fromkeys([*vhosts, *(vhost for vhost in agents if vhost in granted)])
        if vhost not in granted or not all(allows(one, sample) for one in granted[vhost] for sample in SAMPLE_NAMES)
    ]
    if not lacking:
        return Finding(name, Status.OK, f"'{user}' may do everything on the guarded vhosts")
    effect = "queues there are listed, but can't be deleted" if over == "HTTP" else "events can't be published there"
    advice = f"Run: rabbitmqctl set_permissions -p {shell_quoted(lacking[0])} {shell_quoted(user)} '.*' '.*' '.*'"
    return Finding(name, Status.PROBLEM, f"'{user}' may not do everything on {quoted_names(lacking)}: {effect}", advice)


def check_broker_clock() -> Findings:
    try:
        with closing(Management(settings.RABBITMQ_MANAGEMENT_URL, read_timeout=BROKER_SECONDS)) as management:
            before = timezone.now()
            at_broker = management.clock()
    except (BrokerError, ValueError):
        return  # the check of the broker reports it
    if at_broker is not None:
        yield compare_clock("broker clock", at_broker, before)


def compare_clock(name: str, theirs: datetime, before: datetime) -> Finding:
    """Compare a clock with this machine's, which showed ``before`` before the request."""
    after = timezone.now()
    # The broker's time is in whole seconds, so it may be one second behind.
    difference = max(before - theirs - timedelta(seconds=1), theirs - after, timedelta(0))
    way = "behind" if theirs < before else "ahead of"
    return finding_of(Measurement(rules.CLOCK, difference.total_seconds(), {"way": way}).verdict, name)
