"""Functions that several test modules use. Shared fixtures are in fixtures.py."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import amqp
import pika
import pika.exceptions
import pytest
from django.contrib.messages import get_messages
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.utils import timezone

from accounts.models import Owner, PulseUser
from accounts.pulse_users.removal import remove_pulse_user
from accounts.queue_effects import removal_of
from core import removals
from core.confirmation import ConfirmationRequired
from core.models import Removal
from notifications.models import Notification
from queues.actions import effects
from queues.models import Queue, QueueEvent, Watch
from queues.rules.brake import released_queues
from rabbit.management import Management
from rabbit.permissions import Permissions
from rabbit.snapshot import alarms_of
from tests.support.proxy import Proxy
from tools.rabbitmq import PrivateNode

AWAY = "http://guest:guest@127.0.0.1:1"
AWAY_AMQP = "amqp://guest:guest@127.0.0.1:1"
"""The URL of a broker at which nothing listens."""

POLL_SECONDS = 0.02


def mark_for_removal(*pulse_users: PulseUser) -> None:
    """Mark these Pulse users as a removal does that is killed right after its commit."""
    PulseUser.objects.filter(pk__in=[one.pk for one in pulse_users]).update(removing_since=timezone.now())
    Removal.objects.bulk_create(
        [Removal(kind=Removal.Kind.PULSE_USER, name=one.username) for one in pulse_users], ignore_conflicts=True
    )


def remove_as_a_person(pulse_user: PulseUser) -> None:
    """Remove a Pulse user as a person does who confirms that its queues are deleted."""
    person = Owner(pk=0, is_staff=True)
    question = removal_of([pulse_user], person).question(effects.of_removal([pulse_user]))
    remove_pulse_user(pulse_user, removal_of([pulse_user], person, question.confirm if question else ""), person)


def confirmed(change: Callable[[str], Any]) -> Any:
    """Call a change that takes a confirmation as a person does who confirms what it deletes. Return its result."""
    try:
        return change("")
    except ConfirmationRequired as required:
        return change(required.confirm)


def finish_removals() -> int:
    """Carry out all removals, as the task has done after some minutes, and return how many succeeded."""
    Removal.objects.update(due_at=timezone.now() - timedelta(minutes=5))
    return removals.run_due(removals.SECONDS_OF_TASK)


def store_strictest_settings() -> None:
    """Store settings that delete every queue as those of the last pass.

    Then the next pass does not count as the first over its broker, nor as one after a change of the settings.
    """
    strictest = {
        "GUARDIAN_WARN_QUEUE_LENGTH": -1,
        "GUARDIAN_MAX_QUEUE_LENGTH": -1,
        "GUARDIAN_VHOSTS": ["*"],
        "GUARDIAN_IGNORED_QUEUES": "",
        "GUARDIAN_NAMESPACE_POLICY": "delete-unpatterned",
    }
    Watch.objects.update_or_create(id=1, defaults={"deletion_settings": strictest})


class Killed(BaseException):
    """Stops the code under test where it is raised, as SIGKILL would: no `except Exception` catches it."""


@contextmanager
def raising(place: Any, name: str, error: Any, *, after: bool = False) -> Iterator[None]:
    """Have a function raise this error, instead of its work or after it."""
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if after:
            real(*arguments, **options)
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, call)
        yield


@contextmanager
def calling_first(place: Any, name: str, do: Callable[[], Any]) -> Iterator[None]:
    """Call this right before each call of a function."""
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        do()
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, call)
        yield


def call_before(monkeypatch: Any, place: Any, name: str, action: Callable[[], Any]) -> None:
    """Call this once, right before the next call of a function."""
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(place, name, real)
        action()
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, call)


def call_after(monkeypatch: Any, place: Any, name: str, action: Callable[[], Any]) -> None:
    """Call this once, right after the next call of a function that raises no error."""
    real = getattr(place, name)

    def call(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        if getattr(place, name) is call:  # otherwise `call_before` has restored the function
            monkeypatch.setattr(place, name, real)
        action()
        return answer

    monkeypatch.setattr(place, name, call)


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Poll the condition until it is true, and return its value. Fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition is not true within {seconds} s"
        time.sleep(POLL_SECONDS)
    return value


def wait_until_equal(get: Callable[[], Any], expected: Any, seconds: float = 30) -> None:
    """Poll until the value is as expected. Fail after this many seconds, showing the last value."""
    deadline = time.monotonic() + seconds
    while (value := get()) != expected and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    assert value == expected


class BackgroundCall(Future[Any]):
    """A call in another thread."""

    executing: BaseDatabaseWrapper | None = None
    """The thread's database connection while it executes a statement."""


def in_background(call: Callable[..., Any], *arguments: Any) -> BackgroundCall:
    """Call this in a thread with its own database connection."""
    future = BackgroundCall()

    def note(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        future.executing = context["connection"]
        try:
            return execute(sql, params, many, context)
        finally:
            future.executing = None

    def run() -> None:
        try:
            with closing_connections(), connection.execute_wrapper(note):
                result = call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def closing_connections() -> Iterator[None]:
    """Close this thread's database connections at the end."""
    try:
        yield
    finally:
        connections.close_all()


def wait_until_blocked(future: BackgroundCall) -> None:
    """Wait until the call waits for a lock of the database, or has ended.

    SQLite does not tell who waits: there it is enough that the call executes a statement.
    """

    def is_blocked() -> bool:
        other = future.executing
        if other is None or other.vendor == "sqlite":
            return other is not None
        with connection.cursor() as cursor:
            cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [other.connection.get_backend_pid()])
            return cursor.fetchone()[0]

    wait_until(lambda: future.done() or is_blocked())


def in_parallel(*calls: Callable[[], Any]) -> list[Any]:
    """Start these calls at the same moment, each in its own thread. Return what each returned or raised."""
    start = threading.Barrier(len(calls), timeout=60)

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    futures = [in_background(run, call) for call in calls]
    return [future.exception() or future.result() for future in futures]


@contextmanager
def memory_alarm(node: PrivateNode) -> Iterator[None]:
    """Raise the memory alarm of a node: it blocks each connection that publishes."""

    def set_watermark(fraction: float) -> None:
        # The second call returns once each connection is notified.
        node.eval(f"vm_memory_monitor:set_vm_memory_high_watermark({fraction}), rabbit_alarm:get_alarms()")

    set_watermark(0.0)
    try:
        yield
    finally:
        set_watermark(0.4)
        _wait_until_none_is_listed(node, "memory", "mem_alarm")


@contextmanager
def disk_alarm(node: PrivateNode) -> Iterator[None]:
    """Raise the disk alarm of a node."""
    node.eval('rabbit_disk_monitor:set_disk_free_limit("1000000GB"), rabbit_alarm:get_alarms()')
    try:
        yield
    finally:
        node.eval('rabbit_disk_monitor:set_disk_free_limit("50MB")')
        _wait_until_none_is_listed(node, "disk", "disk_free_alarm")


def _wait_until_none_is_listed(node: PrivateNode, resource: str, fact: str) -> None:
    """Wait for the list of nodes: the pass of another test would find the alarm.

    The list is a copy of the node's own facts, and both lag behind. So a list without the alarm may still get it.
    """
    facts = f"[true || {{_, Facts}} <- ets:lookup(node_metrics, node()), proplists:get_bool({fact}, Facts)]"
    wait_until(lambda: node.eval(facts) == "[]")
    management = Management(node.management_url)
    wait_until(lambda: (resource, node.name) not in alarms_of(management.nodes()))


@contextmanager
def full_disk(model: type[Model], *, rows: int) -> Iterator[None]:
    """Have the database report a full disk when this model's table is to get more than this number of rows."""
    table = model._meta.db_table
    if connection.vendor == "sqlite":
        create = [
            f"CREATE TRIGGER full_disk BEFORE INSERT ON {table} WHEN (SELECT count(*) FROM {table}) >= {rows} "
            "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        ]
        drop = ["DROP TRIGGER full_disk"]
    else:
        create = [
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$BEGIN IF (SELECT count(*) FROM {table}) >= {rows} THEN RAISE disk_full; END IF; RETURN NEW; END$$",
            f"CREATE TRIGGER full_disk BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION full_disk()",
        ]
        drop = [f"DROP TRIGGER full_disk ON {table}", "DROP FUNCTION full_disk"]

    def execute(statements: list[str]) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    execute(create)
    try:
        yield
    finally:
        execute(drop)


def sent(recipient: str) -> list[str]:
    """Return the kinds of the notifications to this recipient, oldest first."""
    return list(Notification.objects.filter(recipient=recipient).order_by("id").values_list("kind", flat=True))


def brake_counts() -> tuple[int, int]:
    """Return how many queues the brake blocks, and for how many an operator released it."""
    watch = Watch.objects.get()
    return watch.blocked, len(released_queues(watch, timezone.now()))


def queue_events(name: str) -> list[str]:
    """Return the kinds of the events of the queues of this name, oldest first."""
    return list(QueueEvent.objects.filter(queue_name=name).order_by("id").values_list("kind", flat=True))


def messages_of(response: Any) -> list[str]:
    """Return the messages that the next page will show to the user."""
    return [str(message) for message in get_messages(response.wsgi_request)._queued_messages]


def broker_version(management: Management) -> tuple[int, int]:
    """Return the major and minor version of the broker, such as (4, 3)."""
    major, minor, *_ = management.overview()["rabbitmq_version"].split(".")
    return int(major), int(minor)


def queue_names(management: Management, vhost: str) -> set[str]:
    """Return the names of the queues that the broker lists in a vhost."""
    return {row["name"] for row in management.list_queues(vhost, {"columns": "name,vhost"})}


def queue_lengths(management: Management, vhost: str) -> dict[str, int | None]:
    """Return the length of each queue in a vhost, exact for classic queues. None: the broker does not report it."""
    rows = management.list_queues(vhost, {"disable_stats": "true", "enable_queue_totals": "true"})
    return {row["name"]: row.get("messages") for row in rows}


def queue_row(name: str, **fields: Any) -> Queue:
    """Return an unsaved row of a durable classic queue that has existed for a day."""
    now = timezone.now()
    defaults = {
        "vhost": "/", "type": "classic", "durable": True, "auto_delete": False, "exclusive": False,
        "first_seen": now - timedelta(days=1), "last_seen": now,
    }  # fmt: skip
    return Queue(name=name, **{**defaults, **fields})


def stored_queue(name: str, **fields: Any) -> Queue:
    """Store the row of a durable classic queue."""
    queue = queue_row(name, **fields)
    queue.save()
    return queue


def url_for(broker: Any, username: str, password: str) -> str:
    """Return the AMQP URL with which this user logs in, without a vhost."""
    return f"amqp://{username}:{quote(password, safe='')}@{broker.amqp_url.rpartition('@')[2].rstrip('/')}"


def can_log_in(broker: Any, vhost: str, username: str, password: str) -> bool:
    """Return whether the broker accepts an AMQP connection with this password."""
    try:
        pika.BlockingConnection(
            pika.URLParameters(f"{url_for(broker, username, password)}/{quote(vhost, safe='')}")
        ).close()
    except pika.exceptions.AMQPError:
        return False
    return True


def is_refused(opened: pika.BlockingConnection, action: Callable[[Any], Any]) -> bool:
    """Return whether the broker refuses the action on a channel for lack of permissions."""
    channel = opened.channel()
    try:
        action(channel)
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code != 403:
            raise
        return True
    channel.close()
    return False


@contextmanager
def login_without_configure(management: Management, vhost: str, broker: Any) -> Iterator[str]:
    """Yield the AMQP URL of a RabbitMQ user that may not delete queues."""
    name = f"limited-{uuid.uuid4().hex}"
    management.put_user(name, "secret")
    management.set_permissions(vhost, name, Permissions(configure="^$", write=".*", read=".*"))
    try:
        yield f"amqp://{name}:secret@{broker.amqp_url.rpartition('@')[2]}"
    finally:
        management.delete_user(name)


@contextmanager
def amqp_answers_lost(broker: Any, settings: Any, monkeypatch: Any, *requests: str) -> Iterator[None]:
    """Lose the answers to these AMQP requests, such as ``queue_delete``. The broker carries them out."""
    with Proxy.before(broker.amqp_url) as proxy, monkeypatch.context() as patched:
        for name in requests:
            real = getattr(amqp.Channel, name)

            def request(channel: amqp.Channel, *arguments: Any, real: Any = real, **options: Any) -> Any:
                proxy.cut_after(0)
                return real(channel, *arguments, **options)

            patched.setattr(amqp.Channel, name, request)
        before, settings.RABBIT_URL = settings.RABBIT_URL, proxy.url(broker.amqp_url)
        yield
        settings.RABBIT_URL = before
