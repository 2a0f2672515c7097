"""What ``doctor`` checks of the broker's addresses."""

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import combinations
from urllib.parse import unquote, urlsplit

from django.conf import settings

from core.addresses import split_address
from core.masking import text_of
from queues.guard import pass_run
from rabbit import checkup, snapshot
from rabbit.addresses import are_two, split_addresses, two_clusters, without_credentials
from rabbit.amqp import CONNECTION_LIMIT, QUEUE_LIMIT
from rabbit.errors import BrokerError, BrokerUnavailable, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.threads import ContextThreadPool
from status.doctor.broker import agents_on_broker
from status.doctor.findings import BROKER_SECONDS, Finding, Findings, Status, quoted_names

AMQP = ("amqp", "amqps", "pyamqp")


def check_amqp() -> Findings:
    name = "broker over AMQP"
    urls = split_addresses(settings.RABBIT_URL)
    parts = [split_address(url) for url in urls]
    if not urls or any(one is None or one.scheme not in ("amqp", "amqps") for one in parts):
        return  # the findings of "settings" report it
    url = first_answering(urls)
    try:
        server = checkup.server_properties(url)
        vhosts = (pass_run.guarded_vhosts(agents_on_broker()[0]) or [settings.GUARDIAN_PULSE_VHOST])[:20]
        refused = {vhost: reason for vhost in vhosts if (reason := _refused(url, vhost))}
    except OSError as error:
        advice = "Check RABBIT_URL, its port (5672, or 5671 for amqps) and the firewall. Events can't be published."
        yield Finding(name, Status.PROBLEM, f"it does not answer: {error or 'no answer in time'}", advice)
        return
    if refused:
        reason = next(iter(refused.values()))
        advice = (
            "Guardian deletes queues and publishes over AMQP, so it can't now. Close connections, or raise this limit, "
            "with room for Guardian: see docs/operators.md#the-broker-refuses-to-delete-a-queue."
            if CONNECTION_LIMIT in reason
            else "Delete queues, or raise this limit with rabbitmqctl set_vhost_limits: agents can't register any."
            if QUEUE_LIMIT in reason
            else "Check that the vhost is up, and check the user, the password in RABBIT_URL and its permissions: "
            "Guardian needs all permissions there."
        )
        yield Finding(
            name, Status.PROBLEM, f"Guardian can't declare queues in {quoted_names(refused)}: {reason}", advice
        )
        return
    yield Finding(name, Status.OK, f"{server.product} {server.version} accepts Guardian's login")
    cluster = _cluster_by_http()
    if cluster and server.cluster and are_two(cluster, server.cluster):
        found = f"RABBIT_URL leads to the cluster '{server.cluster}', and RABBITMQ_MANAGEMENT_URL to '{cluster}'"
        yield Finding("one broker", Status.PROBLEM, found, "Set both to addresses of the guarded broker.")


def first_answering(urls: list[str]) -> str:
    """Return the first of several addresses that speaks AMQP, or the last."""
    for url in urls[:-1]:
        with suppress(OSError):
            checkup.server_properties(url)
            return url
    return urls[-1]


def check_addresses() -> Findings:
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
            advice = "Use one RabbitMQ user in all addresses. Otherwise Guardian's permissions depend on the node."
            yield Finding(
                "one RabbitMQ user",
                Status.WARNING,
                f"the addresses have several RabbitMQ users: {quoted_names(users)}",
                advice,
            )


def _address(url: str, cluster_at: Callable[[str], str]) -> tuple[Finding, str]:
    """Check one of several addresses, and return the finding and its cluster's id or name; empty: there is none."""
    name = without_credentials(url)
    try:
        cluster = cluster_at(url)
    except (Refused, NotOnBroker) as error:
        advice = (
            "Check the RabbitMQ user, its tag and the password in this address. Guardian uses the others until then."
        )
        return Finding("broker address", Status.PROBLEM, f"{name} can't be used: {error}", advice), ""
    except (BrokerError, ValueError, OSError) as error:
        advice = "Start the node, or remove the address if the node is gone. Guardian uses the others until then."
        found = f"{name} does not answer: {text_of(error) or 'no answer in time'}"
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
    """Return why Guardian can't declare or delete a queue in a vhost, or "" if it can."""
    try:
        checkup.check_vhost(url, vhost)
    except (Refused, NotOnBroker, BrokerUnavailable) as error:  # the address answered, so the vhost may be down
        return str(error)
    return ""


def _cluster_by_http() -> str:
    """Return the cluster's name by the management API; empty: no answer, which the check of the broker reports."""
    try:
        with closing(Management(settings.RABBITMQ_MANAGEMENT_URL, read_timeout=BROKER_SECONDS)) as management:
            return str(management.overview().get("cluster_name") or "")
    except (BrokerError, ValueError):
        return ""
