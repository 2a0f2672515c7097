"""What ``doctor`` checks of the database, the task queue and its processes."""

from collections.abc import Iterator
from datetime import datetime
from urllib.parse import urlsplit

from django.conf import settings
from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now
from django.utils import timezone

from accounts.models import NOT_ASCII, Owner, comparable
from core.addresses import split_address
from core.checks import OLD_DATABASE_REMEDY, why_not_migratable
from core.models import Lease
from rabbit import checkup
from rabbit.addresses import split_addresses
from rabbit.names import readable
from status import facts, rules
from status.doctor.addresses import AMQP, first_answering
from status.doctor.broker import compare_clock
from status.doctor.findings import Finding, Findings, Status, finding_of, findings_of
from status.facts import Measurement

MAX_ADDRESSES_SHOWN = 20

# The database, and the measurements in it


def check_database() -> Findings:
    """Check the database's version, migrations, that it can be written, and what the rules say about its rows."""
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
                yield compare_clock("database clock", cursor.fetchone()[0], before)
        pending = _pending_migrations()
        yield pending
        if pending.status is Status.OK:
            yield finding_of(facts.attempt(rules.DATABASE_WRITES, facts.write_to_database).verdict)
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
    if why := why_not_migratable(connection):
        return Finding("migrations", Status.PROBLEM, f"this database can't be migrated: {why}", OLD_DATABASE_REMEDY)
    executor = MigrationExecutor(connection)
    pending = [migration for migration, _ in executor.migration_plan(executor.loader.graph.leaf_nodes())]
    if not pending:
        return Finding("migrations", Status.OK, "none is pending")
    names = ", ".join(str(migration) for migration in pending[:3])
    found = f"{len(pending)} pending: {names}{', …' if len(pending) > 3 else ''}"
    return Finding("migrations", Status.PROBLEM, found, "Run manage.py migrate. Checks of the rows were skipped.")


def _rows() -> Findings:
    now = timezone.now()
    yield from findings_of(facts.measure_guardian(now).verdicts())
    yield _operators()
    yield from findings_of(one.verdict for one in _leases(now))
    yield from findings_of(one.verdict for one in _owners_addresses())


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


def _owners_addresses() -> Iterator[Measurement]:
    """Yield the number of owners whose address is in an older form, and the owners who have the same address."""
    older = sorted(Owner.objects.filter(email__regex=NOT_ASCII).values_list("email", flat=True))
    spellings = {comparable(email): {email} for email in older}
    for email in (*older, *Owner.objects.filter(email__in=spellings).values_list("email", flat=True)):
        spellings[comparable(email)].add(email)
    shown = [*map(readable, older[:MAX_ADDRESSES_SHOWN]), *(["…"] if len(older) > MAX_ADDRESSES_SHOWN else [])]
    yield Measurement(rules.OLDER_ADDRESSES, len(older), {"addresses": ", ".join(shown)})
    yield Measurement(rules.SAME_ADDRESS, 0)
    for same in spellings.values():
        if len(same) > 1:
            yield Measurement(rules.SAME_ADDRESS, 1, {"addresses": ", ".join(map(readable, sorted(same)))})


# The task queue


def check_task_queue() -> Findings:
    """Check Redis, the workers and what the front page says about them."""
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
    written = facts.attempt(rules.TASK_QUEUE, facts.write_to_task_queue).verdict
    if written.is_wrong:
        yield finding_of(written)
        return
    is_folder = url.scheme == "filesystem"
    where = "a folder on this machine" if is_folder else f"{url.scheme} on {url.hostname or 'this machine'}"
    yield Finding("task queue", Status.OK, where)
    yield _is_not_guarded(several[0])


def _is_not_guarded(url: str) -> Finding:
    name = "task queue apart"
    # The findings of "settings" report an invalid address.
    guarded_at = split_addresses(settings.RABBIT_URL)
    if urlsplit(url).scheme not in AMQP or not guarded_at or None in map(split_address, guarded_at):
        return Finding(name, Status.OK, "it is not the guarded RabbitMQ")
    advice = "Use Redis. Under a resource alarm the guarded broker blocks all publishers, including Guardian."
    try:
        tasks, guarded = checkup.server_properties(url), checkup.server_properties(first_answering(guarded_at))
    except OSError as error:
        return Finding(name, Status.WARNING, f"it could not be compared with the guarded RabbitMQ: {error}", advice)
    if tasks.cluster and tasks.cluster == guarded.cluster:
        found = f"it is the guarded RabbitMQ: both have the cluster name '{tasks.cluster}'"
        advice += " If these are two clusters, give them different names: rabbitmqctl set_cluster_name NAME"
        return Finding(name, Status.PROBLEM, found, advice)
    return Finding(name, Status.OK, f"it is another RabbitMQ ('{tasks.cluster}') than the guarded one")
