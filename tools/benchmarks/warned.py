"""The time from 500 queues passing their warning threshold to the mails accepted by the mail server."""

import re
import time
from statistics import quantiles

from accounts.models import Owner, PulseUser
from core import broker
from notifications.models import Notification
from queues.models import Queue
from tools.benchmarks import load
from tools.benchmarks.figures import Figure
from tools.benchmarks.running import size
from tools.mail import Mail
from tools.processes import happens
from tools.redis import PrivateRedis

QUEUES = size(10_000, 400)
WARNED = size(500, 20)
ROUNDS = size(18, 2)

POLL_SECONDS = 5
MAX_SECONDS = POLL_SECONDS + 2
SETTINGS = {
    "GUARDIAN_WARN_QUEUE_LENGTH": "2",
    "GUARDIAN_QUIET_SECONDS": "0",
    "GUARDIAN_POLL_SECONDS": str(POLL_SECONDS),
}
TIMEOUT_SECONDS = 120.0


class Mails:
    def __init__(self) -> None:
        self._came: list[tuple[float, Mail]] = []

    def note(self, mail: Mail) -> None:
        self._came.append((time.monotonic(), mail))

    def wait(self, kind: str) -> dict[str, float]:
        """Wait for all mails of a kind, and return their times by queue. Forget all that came."""
        header = f"X-Guardian-Kind: {kind}\r\n".encode()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            found = [(at, mail.subject) for at, mail in self._came if header in mail.content]
            if len(found) >= WARNED:
                self._came.clear()
                return {re.search(r"queue/\S+", subject)[0]: at for at, subject in found}  # type: ignore[index]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} mails of {WARNED} within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.5)


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
    with (
        PrivateRedis() as redis,
        load.guardian({**SETTINGS, "CELERY_BROKER_URL": redis.url}, workers=1, on_mail=mails.note) as stack,
    ):
        assert stack.mail is not None
        if not happens(lambda: Queue.objects.count() == QUEUES, TIMEOUT_SECONDS):
            raise TimeoutError(f"no pass within {TIMEOUT_SECONDS:.0f} s")
        began = time.monotonic()
        for number in range(-1, ROUNDS):  # the first warms up
            load.publish_one_each("/", names)
            load.wait_for_messages("/", queues=QUEUES, messages=WARNED)
            time.sleep((began + number * POLL_SECONDS / ROUNDS - time.monotonic()) % POLL_SECONDS)
            passed = load.publish_one_each("/", names)
            came = mails.wait("warning")
            if number >= 0:
                delays += [came[name] - passed[name] for name in names]
            with broker.session("/") as session:
                for name in names:
                    session.purge_queue(name)
            mails.wait("recovery")
            while Notification.objects.exclude(state=Notification.State.SENT).exists():
                time.sleep(0.1)
            stack.mail.clear()
    where = f"{WARNED} of {QUEUES:,} queues"
    highest = quantiles(delays, n=100)[-1]
    return [Figure(where, "from the message past the threshold to the mail, p99", "s", [highest], limit=MAX_SECONDS)]
