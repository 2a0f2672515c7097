"""The time from a published message to an accepted mail, with Guardian's processes. Runs in `child.py`."""

import os
import re
import smtplib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.message import EmailMessage
from functools import partial
from pathlib import Path
from typing import Any

from accounts.models import Owner, PulseUser
from core import broker
from notifications.mail_sending import MAX_CONNECTIONS
from notifications.models import Notification
from queues.models import Queue
from rabbit.snapshot import COLUMNS, TOTALS
from tools.benchmarks.load import publish_one_each, queue_name, wait_for_messages
from tools.benchmarks.passes import timed
from tools.benchmarks.services import PROJECT
from tools.mail import Mail, MailCatcher
from tools.processes import ProcessGroup

SECONDS = 120.0
"""Timeout for all mails of a round."""


class Mails:
    """Records the arrival times of mails of a kind. It parses them afterwards, since many arrive at once."""

    def __init__(self) -> None:
        self._came: list[tuple[float, Mail]] = []
        self._changed = threading.Condition()
        self._kind = b""
        self._wanted = 0

    def note(self, mail: Mail) -> None:
        """Record a mail in the server's thread."""
        at = time.monotonic()
        with self._changed:
            if self._kind in mail.content:
                self._came.append((at, mail))
                if len(self._came) == self._wanted:  # a notification for each mail would slow the mail server down
                    self._changed.notify_all()

    def expect(self, kind: str, number: int) -> None:
        """Discard all mails, and expect this number of mails of a kind."""
        with self._changed:
            self._came, self._kind, self._wanted = [], f"X-Guardian-Kind: {kind}\r\n".encode(), number

    def wait(self) -> dict[str, float]:
        """Return the arrival times of the mails by queue. Raises TimeoutError after ``SECONDS``."""
        deadline = time.monotonic() + SECONDS
        with self._changed:
            while len(self._came) < self._wanted:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"{len(self._came)} mails of {self._wanted} within {SECONDS:.0f} s")
            came = {_queue_in(mail): at for at, mail in reversed(self._came)}
            wanted = self._wanted
        if len(came) != wanted:
            raise AssertionError(f"{wanted} mails about {len(came)} queues")
        return came


def _queue_in(mail: Mail) -> str:
    found = re.search(r"queue/\S+", mail.subject)
    assert found is not None, mail.subject
    return found[0]


@contextmanager
def at_work() -> Iterator[None]:
    """Run the processes of the Procfile except the web process."""
    var = Path(os.environ["GUARDIAN_VAR_DIR"])
    lines = dict(line.split(": ", 1) for line in (PROJECT / "Procfile").read_text().splitlines() if line)
    group = ProcessGroup(os.environ, directory=PROJECT, logs=var / "logs")
    binaries = Path(sys.executable).parent
    try:
        for name in ("guard", "worker", "beat"):
            command = [str(binaries / "celery"), *lines[name].split()[1:]]
            if name == "beat":
                command += ["--schedule", str(var / "beat-schedule")]
            group.start(name, command)
        yield
    finally:
        group.stop()


def measure(vhost: str, queues: int, warned: int, rounds: int, poll_seconds: int, port: int) -> dict[str, Any]:
    """Return the seconds from each queue's passing its warning threshold to its mail, a list for each round.

    The rounds begin at evenly distributed points of the interval between two passes.

    ``mails`` are the seconds from the first mail to the last, ``bare`` those of as many bare mails, ``listing`` those
    of a pass's list.
    """
    for number in range(queues // 20):  # the warned queues have an owner each: one would get a single mail
        user = PulseUser.objects.create(username=f"user-{number}", ready=True)
        user.owners.add(Owner.objects.create_user(f"owner-{number}@example.org", vouched=True))
    management = broker.management()
    mails = Mails()
    names = [queue_name(number) for number in range(0, queues, queues // warned)]
    delays, lasted, bare, listing = [], [], [], []
    params = {**TOTALS, "columns": COLUMNS}
    with MailCatcher(port=port, on_mail=mails.note) as catcher, at_work():
        deadline = time.monotonic() + SECONDS
        while Queue.objects.count() < queues:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no pass within {SECONDS:.0f} s")
            time.sleep(0.1)
        began = time.monotonic()
        for number in range(1 + rounds):
            publish_one_each(broker.amqp_url(), vhost, names)
            wait_for_messages(management, vhost, queues=queues, messages=len(names))
            time.sleep((began + number * poll_seconds / rounds - time.monotonic()) % poll_seconds)
            mails.expect("warning", len(names))
            passed = publish_one_each(broker.amqp_url(), vhost, names)
            came = mails.wait()
            if number:  # the first warms up
                delays.append([came[name] - passed[name] for name in names])
                lasted.append(max(came.values()) - min(came.values()))
                bare.append(timed(lambda: _send_bare(port, len(names)))[0])
                listing.append(timed(lambda: management.list_queues(vhost, params))[0])
            mails.expect("recovery", len(names))
            with broker.session(vhost) as session:
                for name in names:
                    session.purge_queue(name)
            mails.wait()
            while Notification.objects.exclude(state=Notification.State.SENT).exists():
                time.sleep(0.1)
            catcher.clear()
    return {"delays": delays, "mails": lasted, "bare": bare, "listing": listing}


def _send_bare(port: int, number: int) -> None:
    """Send mails of normal size over as many connections as Guardian uses."""
    share = number // MAX_CONNECTIONS
    with ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
        list(threads.map(partial(_send_over_one, port), [share] * MAX_CONNECTIONS))


def _send_over_one(port: int, number: int) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "guardian@localhost", "owner@example.org", "A mail"
    message.set_content("A line of text, as long as most of them are.\n" * 40)
    with smtplib.SMTP("127.0.0.1", port) as server:
        for _ in range(number):
            server.send_message(message)
