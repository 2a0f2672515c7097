"""System checks of the settings."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from email.utils import parseaddr
from typing import Any
from urllib.parse import SplitResult

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured, ValidationError

from accounts.access import reserved_names
from accounts.models import check_address, normalize_address
from core.addresses import split_address
from guardian_site import environment
from guardian_site.environment import IN_PASSWORDS
from message_store.cassandra import settings as cassandra_settings
from message_store.store import STORES
from queues.rules import shares
from queues.rules.thresholds import POLICIES
from rabbit.addresses import split_addresses

MAX_QUEUE_NAME_LENGTH = 255

HOURS_OF_DAY = 24

SEARCH_SECONDS = 3
"""The timeout for searching the sample names with a regular expression of a setting."""

REMOVED_SETTINGS = {"GUARDIAN_SHARD_BY_VHOST": "To make a pass cheaper, set GUARDIAN_SNAPSHOT=prometheus."}
"""Settings that no longer exist, each with a sentence about its replacement."""

ENV_FILE = ".env"
OF_ENV_FILE = "Let Guardian's user read it, and write it as UTF-8. With Docker compose run: make compose-secrets"

OUR_PREFIXES = ("GUARDIAN_", "RABBIT_", "RABBITMQ_MANAGEMENT_", "MESSAGE_STORE_", "OIDC_")
NO_SETTINGS = re.compile(r"GUARDIAN_(WEB_PORTS|TEST_\w+|FUZZ_\w+)|\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\d+_\w+)?")
"""Variables with our prefixes that compose, the tests and Kubernetes use."""


@register()
def check_settings(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[CheckMessage]:
    if ENV_FILE in settings.UNREADABLE:  # without its settings, all other checks would mislead
        return [*_unreadable()]
    return [
        *_unreadable(),
        *_removed(),
        *_unknown(),
        *_secrets(),
        *_hosts(),
        *_addresses(),
        *_task_queue(),
        *_lengths(),
        *_reminders(),
        *_choices(),
        *_bounds(),
        *_message_store(),
        *_people(),
        *_reserved_users(),
        *_signing_in(),
        *_reports(),
    ]


def _unreadable() -> Iterable[CheckMessage]:
    for name, reason in settings.UNREADABLE.items():
        yield Error(
            f"{name} can't be read: {reason.rstrip('.')}.",
            hint=OF_ENV_FILE if name == ENV_FILE else "See its description in .env.example.",
            id="guardian.E015",
        )


def _removed() -> Iterable[CheckMessage]:
    for name, replacement in REMOVED_SETTINGS.items():
        if name in os.environ:  # settings.py has added the variables of .env
            yield Error(f"{name} was removed.", hint=f"Delete it. {replacement}", id="guardian.E021")


def _unknown() -> Iterable[CheckMessage]:
    from guardian_consumers import Settings  # a slow import

    known = environment.declared.keys() | Settings.variables()  # the command consume has settings of its own
    for name in sorted(os.environ.keys() - known - REMOVED_SETTINGS.keys()):
        if name.startswith(OUR_PREFIXES) and not NO_SETTINGS.fullmatch(name):
            nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            hint = f"Did you mean {nearest[0]}?" if nearest else "See .env.example for all settings."
            yield checks.Warning(f"{name} is not a setting, so it has no effect.", hint=hint, id="guardian.W008")


def _secrets() -> Iterable[CheckMessage]:
    if not _value("SECRET_KEY"):
        yield Error("SECRET_KEY is empty.", hint="Set it to a long random text.", id="guardian.E001")
    for name, form in (
        ("RABBITMQ_MANAGEMENT_URL", "http://user:password@host:15672"),
        ("RABBIT_URL", "amqp://user:password@host:5672"),
    ):
        if not _value(name):
            yield checks.Warning(
                f"{name} is empty: no queue is guarded.", hint=f"Set it to {form}.", id="guardian.W001"
            )


def _hosts() -> Iterable[CheckMessage]:
    if not any(settings.ALLOWED_HOSTS) and not settings.DEBUG:
        yield Error(
            "ALLOWED_HOSTS has no host: each request would get a 400.",
            hint="Add the host of GUARDIAN_BASE_URL, or leave ALLOWED_HOSTS out.",
            id="guardian.E033",
        )


OF_CLUSTER = ("RABBITMQ_MANAGEMENT_URL", "RABBIT_URL")
"""The settings that may have several addresses."""


def _addresses() -> Iterable[CheckMessage]:
    for name, schemes in ((name, limits.schemes) for name, limits in environment.declared.items() if limits.schemes):
        urls = _value(name)
        if not isinstance(urls, list):
            urls = split_addresses(urls) if name in OF_CLUSTER else [urls] if urls else []
        # Don't repeat the value: it may contain a password.
        numbers = [f" (address {number + 1} of {len(urls)})" if len(urls) > 1 else "" for number in range(len(urls))]
        for url, which in zip(urls, numbers, strict=True):
            parts = split_address(url)
            if parts is None or parts.scheme not in schemes or not parts.hostname:
                begin = " or ".join(f"{scheme}://" for scheme in schemes)
                hint = f"Begin it with {begin}, and name a host. {IN_PASSWORDS}"
                yield Error(f"{name} is not a valid URL{which}.", hint=hint, id="guardian.E002")
            elif problem := _unused_part(name, parts):
                yield Error(f"{name} {problem[0]}{which}.", hint=problem[1], id="guardian.E030")


def _unused_part(name: str, parts: SplitResult) -> tuple[str, str] | None:
    """Return what is wrong with a valid URL, a part of which would not be used, and the remedy; None: nothing."""
    if parts.query or parts.fragment:
        return "has a ? or a #", f"Remove the part from there on. {IN_PASSWORDS}"
    if name == "RABBITMQ_MANAGEMENT_URL" and parts.path.rstrip("/").endswith("/api"):
        return "ends in /api", "Remove /api: Guardian appends it."
    if name == "RABBIT_URL" and parts.path.strip("/"):
        return "names a vhost", "Remove the part after the port: GUARDIAN_VHOSTS names the guarded vhosts."
    if name.startswith("GUARDIAN_PUBLIC_") and "@" in parts.netloc:
        return "has a user", "Remove the user and the password: every owner sees this address."
    if name == "GUARDIAN_PUBLIC_AMQP_URL" and parts.path.strip("/"):
        return "names a vhost", "Remove the part after the port: each page shows its own vhost."
    if name == "GUARDIAN_BASE_URL":
        if parts.path.strip("/") or "@" in parts.netloc:
            return (
                "has more than a scheme, a host and a port",
                "Give Guardian a host name of its own: it has no prefix.",
            )
        if not parts.netloc.isascii():
            return "has a host that is not ASCII", "Write it as browsers send it, such as xn--bcher-kva.example."
    return None


def _task_queue() -> Iterable[CheckMessage]:
    # Celery separates several URLs by semicolons.
    several = settings.CELERY_BROKER_URL.split(";")
    queues = [parts for url in several if (parts := split_address(url)) is not None]
    if len(queues) < len(several) or not queues[0].scheme:
        yield Error(
            "CELERY_BROKER_URL is not a valid URL.",
            hint=f"For Redis write redis://host:6379/0. {IN_PASSWORDS}",
            id="guardian.E003",
        )
        return
    guarded = {_host_and_port(split_address(url)) for url in split_addresses(_value("RABBIT_URL"))}
    guarded |= {(_host(split_address(url)), None) for url in split_addresses(_value("RABBITMQ_MANAGEMENT_URL"))}
    of_amqp = [tasks for tasks in queues if tasks.scheme in ("amqp", "amqps", "pyamqp")]
    if any(_host_and_port(tasks) in guarded or (_host(tasks), None) in guarded for tasks in of_amqp):
        yield Error(
            "CELERY_BROKER_URL is the RabbitMQ that Guardian guards.",
            hint=(
                "Use Redis, or leave it empty for the file system. Under a memory or disk alarm, the guarded broker "
                "blocks all publishers, including Celery, and Guardian would stop when you need it most."
            ),
            id="guardian.E004",
        )


def _reminders() -> Iterable[CheckMessage]:
    hours = settings.GUARDIAN_REMINDER_HOURS
    if 0 < hours < HOURS_OF_DAY:
        yield Error(
            f"GUARDIAN_REMINDER_HOURS is {hours}.",
            hint="Set it to at least 24, or to 0 for no reminders: nobody gets more than one a day about a queue.",
            id="guardian.E034",
        )


def _lengths() -> Iterable[CheckMessage]:
    warn_length, max_length = settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH
    if warn_length >= max_length:
        yield Error(
            f"GUARDIAN_WARN_QUEUE_LENGTH ({warn_length}) is not below GUARDIAN_MAX_QUEUE_LENGTH ({max_length}).",
            hint="Lower the first or raise the second. Otherwise queues are deleted before their owners are warned.",
            id="guardian.E006",
        )
    owners_max_length = settings.GUARDIAN_OWNERS_MAX_QUEUE_LENGTH
    if owners_max_length < 0 or 0 < owners_max_length <= warn_length:
        yield Error(
            f"GUARDIAN_OWNERS_MAX_QUEUE_LENGTH is {owners_max_length}.",
            hint=(
                f"Set it above GUARDIAN_WARN_QUEUE_LENGTH ({warn_length}), or to 0 if owners may set no deletion limit."
            ),
            id="guardian.E017",
        )


def _choices() -> Iterable[CheckMessage]:
    declared = {name: limits.choices for name, limits in environment.declared.items() if limits.choices}
    registered = {"GUARDIAN_THRESHOLD_POLICY": tuple(POLICIES), "MESSAGE_STORE": tuple(STORES)}
    for name, choices in (declared | registered).items():
        if _value(name) not in choices:
            yield Error(
                f"{name} is '{_value(name)}'.", hint=f"Choose one of: {', '.join(choices)}.", id="guardian.E008"
            )
    yield from _ignored_queues(settings.GUARDIAN_IGNORED_QUEUES)
    guarded = settings.GUARDIAN_VHOSTS
    if guarded and "*" not in guarded and settings.GUARDIAN_PULSE_VHOST not in guarded:
        yield checks.Warning(
            f"GUARDIAN_VHOSTS leaves out GUARDIAN_PULSE_VHOST ('{settings.GUARDIAN_PULSE_VHOST}').",
            hint="Add it: without it the queues of Pulse users are not guarded.",
            id="guardian.W003",
        )
    if "*" in settings.GUARDIAN_VHOSTS and len(settings.GUARDIAN_VHOSTS) > 1:
        yield Error("GUARDIAN_VHOSTS has a * and other names.", hint="Use * alone for all vhosts.", id="guardian.E010")


_SEARCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
for name in names:
    re.search(pattern, name)
"""


def _ignored_queues(pattern: str) -> Iterable[CheckMessage]:
    """Check the regular expression: its syntax, and its run time."""
    try:
        re.compile(pattern)
    except re.error as error:
        yield Error(
            f"GUARDIAN_IGNORED_QUEUES is not a regular expression: {error}.",
            hint="Set it to an expression for queues to ignore, such as ^(amq\\.gen|test-), or leave it empty.",
            id="guardian.E009",
        )
        return
    if pattern:
        yield from _run_time("GUARDIAN_IGNORED_QUEUES", pattern, "A queue of such a name would stop Guardian's passes.")


def _run_time(setting: str, pattern: str, consequence: str) -> Iterable[CheckMessage]:
    """Check that a regular expression takes no long time on any name.

    Clients choose the names. Some names make a careless expression backtrack for hours. So search sample names that are
    composed of parts of the expression.
    """
    words = {"", *re.findall(r"[\w/.-]+", pattern)}
    repeated = {*pattern, *words, *re.findall(r"\w+", pattern), "a", "0"} - {""}
    names = [
        f"{word}{part * MAX_QUEUE_NAME_LENGTH}"[: MAX_QUEUE_NAME_LENGTH - 2] + end
        for word in sorted(words)
        for part in sorted(repeated)
        for end in ("!", "\n!")
    ]
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps([pattern, names]).encode(),
            stderr=subprocess.DEVNULL,
            timeout=SEARCH_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        yield checks.Warning(
            f"{setting} takes too long on some names.",
            hint=f"Avoid nested repetition, such as (a+)+. {consequence}",
            id="guardian.W006",
        )


def _bounds() -> Iterable[CheckMessage]:
    for name, (least, most, *_) in environment.declared.items():
        if least > -math.inf and not least <= _value(name) <= most:
            numbers = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
            yield Error(f"{name} is {_value(name)}.", hint=f"Set it to a number {numbers}.", id="guardian.E011")
    if (share := shares.share(settings.GUARDIAN_ARCHIVE_TOTAL_BYTES)) < settings.GUARDIAN_ARCHIVE_MAX_BYTES:
        yield checks.Warning(
            f"GUARDIAN_ARCHIVE_MAX_BYTES exceeds what the archives of one owner may take: {share} bytes, a fifth of "
            "GUARDIAN_ARCHIVE_TOTAL_BYTES.",
            hint="Raise the second, or lower the first: larger archives can't be kept, compressed as they are.",
            id="guardian.W009",
        )
    if settings.GUARDIAN_POLL_MAX_SECONDS < settings.GUARDIAN_POLL_SECONDS:
        yield Error(
            "GUARDIAN_POLL_MAX_SECONDS is below GUARDIAN_POLL_SECONDS.",
            hint="Raise the first: it is the longest wait between passes during an outage of the broker.",
            id="guardian.E013",
        )


def _message_store() -> Iterable[CheckMessage]:
    if settings.MESSAGE_STORE != "cassandra":
        if settings.CASSANDRA_HOSTS:
            yield checks.Warning(
                f"CASSANDRA_HOSTS is set, but MESSAGE_STORE is '{settings.MESSAGE_STORE}'.",
                hint="Set MESSAGE_STORE=cassandra, or leave CASSANDRA_HOSTS empty.",
                id="guardian.W007",
            )
        return
    for name, parse in (
        ("CASSANDRA_HOSTS", cassandra_settings.contact_points),
        ("CASSANDRA_REPLICATION", cassandra_settings.replication),
    ):
        try:
            parse()
        except ValueError as error:
            yield Error(f"{name}: {error}.", hint="See its description in .env.example.", id="guardian.E032")
    if not cassandra_settings.KEYSPACE.fullmatch(settings.CASSANDRA_KEYSPACE):
        yield Error(
            f"CASSANDRA_KEYSPACE is '{settings.CASSANDRA_KEYSPACE}'.",
            hint="Use up to 48 of the characters a to z, 0 to 9 and _. Begin with a letter.",
            id="guardian.E032",
        )
    if bool(settings.CASSANDRA_USER) != bool(settings.CASSANDRA_PASSWORD):
        yield Error(
            "Only one of CASSANDRA_USER and CASSANDRA_PASSWORD is set.", hint="Set both or none.", id="guardian.E032"
        )
    if settings.MESSAGE_STORE_MAX_BODY > cassandra_settings.MAX_BODY:
        yield Error(
            f"MESSAGE_STORE_MAX_BODY is {settings.MESSAGE_STORE_MAX_BODY}.",
            hint=f"Cassandra stores messages of up to {cassandra_settings.MAX_BODY} bytes. Lower it.",
            id="guardian.E032",
        )
    if 0 < settings.MESSAGE_STORE_DELAY_SECONDS < 1:
        yield Error(
            f"MESSAGE_STORE_DELAY_SECONDS is {settings.MESSAGE_STORE_DELAY_SECONDS}.",
            hint="Set it to 1 or more: a message is stored within two thirds of it. Or 0: readers may miss some.",
            id="guardian.E032",
        )


def _people() -> Iterable[CheckMessage]:
    # Django's validator refuses hosts without a dot, such as a machine's own name.
    if not re.fullmatch(r"[^@\s]+@[A-Za-z0-9.-]*[A-Za-z0-9]", parseaddr(settings.DEFAULT_FROM_EMAIL)[1]):
        yield Error(
            f"DEFAULT_FROM_EMAIL is '{settings.DEFAULT_FROM_EMAIL}', which contains no e-mail address.",
            hint="Write it like Guardian <guardian@example.org>.",
            id="guardian.E016",
        )
    for address in settings.GUARDIAN_OPERATOR_EMAILS:
        try:
            check_address(normalize_address(address))
        except ValidationError:
            yield Error(
                f"GUARDIAN_OPERATOR_EMAILS has '{address}', which is not an e-mail address.",
                hint="Separate addresses by commas.",
                id="guardian.E014",
            )
    if not settings.GUARDIAN_OPERATOR_EMAILS:
        yield checks.Warning(
            "GUARDIAN_OPERATOR_EMAILS is empty: nobody is notified of outages and of queues without an owner.",
            hint="Add at least one address.",
            id="guardian.W002",
        )


def _reserved_users() -> Iterable[CheckMessage]:
    for entry in settings.GUARDIAN_RESERVED_USERS:
        if reserved_names.is_name(entry):
            continue
        if fault := _fault_of_pattern(entry):
            yield Error(
                f"GUARDIAN_RESERVED_USERS has '{entry}', which is neither a name nor a usable expression: {fault}.",
                hint="Separate names and regular expressions by commas, such as guest,admin,^ops-.",
                id="guardian.E031",
            )
        else:
            yield from _run_time("GUARDIAN_RESERVED_USERS", entry, "The creation of such a Pulse user would never end.")


def _fault_of_pattern(entry: str) -> str:
    """Return what is wrong with an entry of GUARDIAN_RESERVED_USERS that is no name; "": nothing."""
    try:
        pattern = reserved_names.pattern(entry)
    except re.error as error:
        return str(error)
    if entry.count("{") != entry.count("}"):
        return "a comma between braces separates entries"
    return "it matches every name" if pattern.search("") else ""


def _signing_in() -> Iterable[CheckMessage]:
    for domain in settings.GUARDIAN_VOUCHED_DOMAINS:
        if not domain.isascii() or not re.fullmatch(r"[^\s@*/:.,;]+(\.[^\s@*/:.,;]+)*", domain):
            yield Error(
                f"GUARDIAN_VOUCHED_DOMAINS has '{domain}', which is not a domain.",
                hint="Write the part of an address after the @, such as example.org. Add each subdomain.",
                id="guardian.E018",
            )
    if settings.OIDC_ISSUER:
        for name in ("OIDC_CLIENT_ID", "OIDC_CLIENT_SECRET"):
            if not _value(name):
                yield Error(
                    f"{name} is empty, but OIDC_ISSUER is set.",
                    hint="Register Guardian with the issuer to get an id and a secret, or leave OIDC_ISSUER empty.",
                    id="guardian.E019",
                )
    elif settings.OIDC_VOUCHED_GROUPS:
        yield checks.Warning(
            "OIDC_VOUCHED_GROUPS is set, but OIDC_ISSUER is empty, so no owner is in a group.",
            hint="Set OIDC_ISSUER, or leave OIDC_VOUCHED_GROUPS empty.",
            id="guardian.W004",
        )


def _reports() -> Iterable[CheckMessage]:
    if not settings.SENTRY_DSN:
        return
    from guardian_site import sentry  # a slow import

    if not sentry.is_dsn(settings.SENTRY_DSN):
        # Don't repeat the value: it contains a secret key.
        yield Error(
            "SENTRY_DSN is not the address of a project.",
            hint="Copy it from the project's settings in Sentry: https://key@host/number.",
            id="guardian.E020",
        )


def _value(name: str) -> Any:
    try:
        return getattr(settings, name)
    except ImproperlyConfigured:  # Django raises it for an empty SECRET_KEY
        return ""


def _host(parts: SplitResult | None) -> str:
    host = (parts.hostname or "") if parts else ""
    return "localhost" if host in ("127.0.0.1", "::1") else host


def _host_and_port(parts: SplitResult | None) -> tuple[str, int | None]:
    return (_host(parts), (parts.port or (5671 if parts.scheme == "amqps" else 5672)) if parts else None)
