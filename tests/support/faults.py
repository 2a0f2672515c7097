"""Helpers for faults: act in the middle of a pass, kill a process after an effect, and run what follows."""

import os
import signal
import smtplib
import threading
import time
import traceback
from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple

import amqp
from django.core.cache import cache
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.utils import timezone

from agents.models import Consumer, SubscriptionQueue
from agents.sweeps import sweep
from core import tasks
from core.models import Lease, Removal
from notifications import claims, sending
from notifications.models import Notification
from queues.archives import replay
from queues.guard import destroying, monitor, once
from queues.guard.deleter import _Run
from queues.moves import moving
from rabbit import http, snapshot
from rabbit.confirmed import ConfirmedPublisher
from rabbit.fetching import Fetch
from tests.support.toolbox import call_after, call_before

STEPS = {
    "the list": (snapshot, "take"),
    "the decision": (monitor, "write"),
    "the recheck": (destroying, "_declare"),
    "the announcement": (_Run, "_mark_sent"),
    "the first batch": (destroying, "store_batch"),
    "the deletion": (Fetch, "delete_queue"),
}
"""The steps of a pass that deletes a queue, and their functions."""

REPLAY_STEPS = {"the first batch of a replay": (ConfirmedPublisher, "publish")}

EXPIRING_TABLES = ("guardian_cache", "core_lease")
"""Tables of rows that expire, which `let_time_pass` lets expire: the cache and leases."""

CHILD_SECONDS = 60


def once_after(monkeypatch, step, action):
    """Call the action once, right after this step."""
    call_after(monkeypatch, *(STEPS | REPLAY_STEPS)[step], action)


def once_before(monkeypatch, step, action):
    """Call the action once, right before this step."""
    call_before(monkeypatch, *STEPS[step], action)


def let_time_pass():
    """Let leases and locks expire, and make deferred work due, as after some minutes."""
    before = timezone.now() - timedelta(minutes=5)
    Lease.objects.exclude(holder=None).update(expires_at=before)
    cache.clear()  # which has the counts of rate limits
    Removal.objects.update(due_at=before)
    Notification.objects.filter(claims.Unsent).update(due_at=before)
    for registered in (SubscriptionQueue, Consumer):
        registered.objects.update(created=before)


def run_scheduled_work():
    """Run the scheduled work: a sweep, the removals, the replays, the moves, two passes and a sender."""
    sweep.sweep_orphans()
    tasks.finish_removals()
    replay.run_due()
    moving.run_due()
    for _ in range(2):  # a queue is gone after two lists
        once.run_once()
    sending.send_due()


class ProcessEnd(NamedTuple):
    """How a process ended: whether it was killed, and its effects before."""

    killed: bool
    effects: list[str]

    @property
    def killed_after_mail(self):
        """Whether it was killed after the mail server accepted a mail and before it recorded that."""
        return self.killed and self.effects[-1] == MAIL


MAIL = "a mail"


def killed_after(number, do):
    """Call ``do`` in a separate process that is killed with SIGKILL after this number of effects.

    An effect is visible to other processes: a commit, an answered request that changes the broker, an accepted mail.
    So the numbers cover every state in which a kill can leave the system, except for rows that expire. With fewer
    effects the process ends normally.
    """
    connections.close_all()  # processes cannot share connections
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _count_effects(number, writing)
            do()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    code = _wait_for(process)
    with os.fdopen(reading) as told:
        effects = told.read().splitlines()
    assert code in (0, -signal.SIGKILL), f"the process ended with {code} after {effects}"
    return ProcessEnd(code != 0, effects)


def _wait_for(process):
    deadline = time.monotonic() + CHILD_SECONDS
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise AssertionError("the process neither ended nor was killed")
        time.sleep(0.005)


def _count_effects(last, pipe):
    """Write each effect of this process to the pipe, and kill it after this number."""
    counting = threading.Lock()
    left = last

    def note(effect):
        nonlocal left
        with counting:
            os.write(pipe, f"{effect}\n".encode())
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(CHILD_SECONDS)  # until the signal arrives

    send, commit, send_mail = http.PooledClient.send, BaseDatabaseWrapper.commit, smtplib.SMTP.sendmail
    written = defaultdict(list)  # by connection: each thread has its own

    def noting(request):
        real = getattr(amqp.Channel, request)

        def request_and_note(self, *arguments, **options):
            answer = real(self, *arguments, **options)
            if not options.get("passive"):
                note(f"AMQP {request}")
            return answer

        setattr(amqp.Channel, request, request_and_note)

    for request in (
        "queue_declare",
        "queue_bind",
        "queue_delete",
        "queue_purge",
        "exchange_delete",
        "basic_ack",
        "basic_publish",
    ):
        noting(request)

    def send_and_note(self, method, target, *arguments, **options):
        answer = send(self, method, target, *arguments, **options)
        if method != "GET":
            note(f"{method} {target.partition('?')[0]}")
        return answer

    def commit_and_note(self):
        commit(self)
        if of_this := written.pop(self, []):
            note(f"commit of {of_this[-1]}")

    def send_mail_and_note(self, *arguments, **options):
        refused = send_mail(self, *arguments, **options)
        note(MAIL)
        return refused

    def execute_and_note(execute, sql, params, many, context):
        answer = execute(sql, params, many, context)
        is_write = sql.lstrip().upper().startswith(("INSERT", "UPDATE", "DELETE"))
        if is_write and not any(table in sql for table in EXPIRING_TABLES):
            written[context["connection"]].append(" ".join(sql.split()[:3]))
            if not context["connection"].in_atomic_block:
                note(written[context["connection"]].pop())
        return answer

    def count_on(connection, **_):
        if execute_and_note not in connection.execute_wrappers:  # it may connect again
            connection.execute_wrappers.append(execute_and_note)

    http.PooledClient.send = send_and_note
    BaseDatabaseWrapper.commit = commit_and_note
    smtplib.SMTP.sendmail = send_mail_and_note
    count_on(connections["default"])
    connection_created.connect(count_on, weak=False)  # for other threads
