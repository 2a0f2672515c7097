"""The time from 500 queues passing their warning threshold to the mails accepted by the mail server."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

from accounts.models import Owner, PulseUser
from core import broker
from notifications.models import Notification
from queues.models import Queue
from tools.benchmarks import load
from tools.benchmarks.figures import Figure
from tools.benchmarks.running import PROJECT, size
from tools.mail import Mail, MailCatcher
from tools.processes import ProcessGroup
from tools.redis import PrivateRedis

QUEUES = size(10_000, 400)
WARNED = size(500, 20)
ROUNDS = size(18, 2)

POLL_SECONDS = 5
MAX_SECONDS = POLL_SECONDS + 2
TIMEOUT_SECONDS = 120.0


class Mails:
    """The arrival times of mails of a kind. It parses them afterwards, since many arrive at once."""

    def __init__(self) -> None:
        self._came: list[tuple[float, Mail]] = []
        self._changed = threading.Condition()
        self._kind = b""

    def note(self, mail: Mail) -> None:
        """Record a mail in the server's thread."""
        at = time.monotonic()
        with self._changed:
            if self._kind in mail.content:
                self._came.append((at, mail))
                if len(self._came) == WARNED:  # a notification for each mail would slow the mail server down
                    self._changed.notify_all()

    def expect(self, kind: str) -> None:
        """Discard all mails, and expect those of a kind."""
        with self._changed:
            self._came, self._kind = [], f"X-Guardian-Kind: {kind}\r\n".encode()

    def wait(self) -> dict[str, float]:
        """Return the arrival times of the mails by queue."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._came) >= WARNED, TIMEOUT_SECONDS):
                raise TimeoutError(f"{len(self._came)} mails of {WARNED} within {TIMEOUT_SECONDS:.0f} s")
            return {re.search(r"queue/\S+", mail.subject)[0]: at for at, mail in self._came}  # type: ignore[index]


@contextmanager
def guardian(mail_url: str, redis_url: str) -> Iterator[None]:
    """Run the processes of the Procfile except the web process."""
    environment = {
        **os.environ,
        "GUARDIAN_WARN_QUEUE_LENGTH": "2",
        "GUARDIAN_QUIET_SECONDS": "0",
        "GUARDIAN_POLL_SECONDS": str(POLL_SECONDS),
        "CELERY_BROKER_URL": redis_url,
        "EMAIL_URL": mail_url,
    }
    directory = Path(os.environ["GUARDIAN_VAR_DIR"])
    lines = dict(line.split(": ", 1) for line in (PROJECT / "Procfile").read_text().splitlines() if line)
    group = ProcessGroup(environment, directory=PROJECT, logs=directory / "logs")
    celery = str(Path(sys.executable).parent / "celery")
    try:
        for name in ("guard", "worker", "beat"):
            more = ["--schedule", str(directory / "beat-schedule")] if name == "beat" else []
            group.start(name, [celery, *lines[name].split()[1:], *more])
        yield
    finally:
        group.stop()


def warned() -> list[Figure]:
    """Measure with production's processes and task queue.

    The rounds begin at evenly distributed points of the interval between two passes, so the next pass is up to one
    interval away.
    """
    load.declare_queues("/", range(QUEUES))
    load.wait_for_messages("/", queues=QUEUES, messages=0)
    for name in {load.user_name(number) for number in range(QUEUES)}:  # an owner each: one would get a single mail
        user = PulseUser.objects.create(username=name, ready=True)
        user.owners.add(Owner.objects.create_user(f"{name}@example.org", vouched=True))
    mails = Mails()
    names = [load.queue_name(number) for number in range(0, QUEUES, QUEUES // WARNED)]
    delays = []
    with PrivateRedis() as redis, MailCatcher(on_mail=mails.note) as catcher, guardian(catcher.url, redis.url):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while Queue.objects.count() < QUEUES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no pass within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.1)
        began = time.monotonic()
        for number in range(-1, ROUNDS):  # the first warms up
            load.publish_one_each("/", names)
            load.wait_for_messages("/", queues=QUEUES, messages=WARNED)
            time.sleep((began + number * POLL_SECONDS / ROUNDS - time.monotonic()) % POLL_SECONDS)
            mails.expect("warning")
            passed = load.publish_one_each("/", names)
            came = mails.wait()
            if number >= 0:
                delays += [came[name] - passed[name] for name in names]
            mails.expect("recovery")
            with broker.session("/") as session:
                for name in names:
                    session.purge_queue(name)
            mails.wait()
            while Notification.objects.exclude(state=Notification.State.SENT).exists():
                time.sleep(0.1)
            catcher.clear()
    where = f"{WARNED} of {QUEUES:,} queues"
    highest = quantiles(delays, n=100)[-1]
    return [Figure(where, "from the message past the threshold to the mail, p99", "s", [highest], limit=MAX_SECONDS)]
