"""``make pictures``: take the screenshots for the documentation with Chromium.

Guardian runs with a private RabbitMQ and mail server. The lengths of the last hour are written to the database.
"""

import contextlib
import json
import math
import os
import re
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import django
import pika
from playwright.sync_api import Page, sync_playwright

from tools.demo import ExpectationFailed, channel_at
from tools.mail import Mail
from tools.processes import StartError, end_with_parent
from tools.stack import PROJECT, Stack, isolated, turn_signals_into_interrupts

PICTURES = PROJECT / "docs" / "pictures"
MAX_BYTES = 200_000
WAIT_SECONDS = 150
"""Consumers are counted every minute."""
CHROMIUM = "/usr/bin/chromium"
OWNER = "alice@example.org"
OPERATOR = "ops@example.org"
VAR = PROJECT / "var" / "pictures"
SETTINGS = {
    "DATABASE_URL": f"sqlite:///{VAR / 'guardian.sqlite3'}",
    "GUARDIAN_POLL_SECONDS": "1",
    "GUARDIAN_QUIET_SECONDS": "0",
    "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
    "DEFAULT_FROM_EMAIL": "guardian@example.org",
}


class SampleQueue(NamedTuple):
    """A queue with its length now and an hour ago, and whether it has a consumer."""

    pulse_user: str
    name: str
    now: int
    before: int
    has_consumer: bool = True


QUEUES = {
    f"queue/{queue.pulse_user}/{queue.name}": queue
    for queue in (
        SampleQueue("alice-builds", "linux", 140, 90),
        SampleQueue("alice-builds", "windows", 2_600, 1_900),
        SampleQueue("alice-builds", "macos", 0, 12),
        SampleQueue("alice-nightly", "reports", 5_900, 700, has_consumer=False),
        SampleQueue("alice-nightly", "mail", 31, 40),
        SampleQueue("bob-metrics", "raw", 1_250, 1_100),
        SampleQueue("bob-metrics", "daily", 7, 3),
    )
}
LONG = "queue/alice-nightly/reports"
UNOWNED = "left-by-nobody"
DELETED, DELETED_FROM = "queue/alice-builds/ios", "exchange/alice-builds/done"


class Screenshot(NamedTuple):
    """A screenshot of a page as ``email`` sees it, of this many pixels from the top."""

    name: str
    email: str
    path: str
    height: int


def screenshots() -> list[Screenshot]:
    from queues.models import Archive, Queue

    return [
        Screenshot("queues", OWNER, "/queues/", 500),
        Screenshot("queue", OWNER, f"/queues/{Queue.objects.get(name=LONG).uuid}/", 860),
        Screenshot("archive", OWNER, f"/archives/{Archive.objects.get().uuid}/", 800),
        Screenshot("pulse-users", OWNER, "/pulse-users/", 700),
        Screenshot("admin", OPERATOR, "/admin/", 940),
    ]


def prepare(stack: Stack, consumers: contextlib.ExitStack) -> None:
    """Create owners, Pulse users and queues with messages and consumers, and start Guardian."""
    stack.prepare()
    assert stack.node is not None
    stack.node.ctl("set_cluster_name", "rabbit@example.org")
    os.environ.update(stack.environment, DJANGO_SETTINGS_MODULE="guardian_site.settings")
    django.setup()
    url = stack.environment["RABBIT_URL"]
    urls = {
        name: f"amqp://{name}:{password}@{url.rpartition('@')[2]}" for name, password in _create_pulse_users().items()
    }
    for name, queue in QUEUES.items():
        with channel_at(urls[queue.pulse_user]) as channel:
            exchange = f"exchange/{queue.pulse_user}/done"
            channel.exchange_declare(exchange, "topic", durable=True)
            channel.queue_declare(name, durable=True)
            channel.queue_bind(name, exchange, f"{queue.name}.#")
        if queue.has_consumer:
            channel = consumers.enter_context(channel_at(urls[queue.pulse_user]))
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(name, lambda *_: None)
    with channel_at(url) as channel:
        channel.queue_declare(UNOWNED, durable=True)
        channel.queue_declare(DELETED, durable=True)
        channel.queue_bind(DELETED, DELETED_FROM, "ios.#")
        stack.manage("monitor_queues", "--once")
        _write_last_hour()
        for queue in QUEUES.values():
            for number in range(queue.now):
                exchange, body = f"exchange/{queue.pulse_user}/done", f"message {number}".encode()
                channel.basic_publish(exchange, f"{queue.name}.opt", body)
        for number in range(420):
            channel.basic_publish("", UNOWNED, f"message {number}".encode())
        _delete_with_archive(channel)
    stack.start()


def _delete_with_archive(channel: Any) -> None:
    from accounts.models import Owner
    from queues.actions import single
    from queues.models import Queue

    channel.confirm_delivery()
    for number in range(1, 41):
        body = json.dumps({"build": number, "result": "passed" if number % 7 else "failed"}).encode()
        channel.basic_publish(DELETED_FROM, "ios.opt", body, pika.BasicProperties(content_type="application/json"))
    single.delete_queue(Queue.objects.get(name=DELETED), Owner.objects.get(email=OWNER))


def _create_pulse_users() -> dict[str, str]:
    """Create the owners and their Pulse users. Return the Pulse users' passwords by name."""
    from accounts.models import Owner
    from accounts.pulse_users.creation import create_pulse_user

    alice, bob = (Owner.objects.create_user(email, vouched=True) for email in (OWNER, "bob@example.org"))
    Owner.objects.create_superuser(OPERATOR)
    pulse_users = dict.fromkeys(queue.pulse_user for queue in QUEUES.values())
    return {name: create_pulse_user(name, owners=[bob if name.startswith("bob") else alice])[1] for name in pulse_users}


def _write_last_hour() -> None:
    from django.utils import timezone

    from queues.models import Pass, Queue, QueueSample

    now = timezone.now()
    QueueSample.objects.all().delete()  # all queues were empty
    samples, passes = [], []
    for minute in range(60):
        at, seconds = now - timedelta(minutes=60 - minute), 0.03 + (minute * 7 % 5) / 200
        passes.append(Pass(at=at, queues=len(QUEUES) + 1, seconds=seconds, listing_seconds=seconds * 0.7))
        for queue in Queue.objects.filter(name__in=QUEUES):
            before, last = QUEUES[queue.name].before, QUEUES[queue.name].now
            wave = math.sin(minute / 4 + queue.pk) + math.sin(minute / 1.7) / 2
            length = round(before + (last - before) * minute / 60 + wave * max(last, before) / 40)
            samples.append(QueueSample(queue=queue, at=at, length=max(length, 0)))
    QueueSample.objects.bulk_create(samples)
    Pass.objects.bulk_create(passes)
    Queue.objects.filter(name__in=QUEUES).update(first_seen=now - timedelta(days=12))


def wait_for_warning(stack: Stack, mails: list[Mail]) -> Mail:
    """Wait for passes, statistics of all queues and the warning mail, and return it. Raises ExpectationFailed."""
    from core import broker
    from queues.models import Pass, Watch

    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        stack.check()
        rows = broker.management().list_queues("/", {})
        warnings = [mail for mail in list(mails) if OWNER in mail.recipients and LONG in mail.subject]
        is_counted = Watch.objects.exclude(consumers_counted_at=None).exists() and Pass.objects.count() > 75
        if warnings and is_counted and sum("consumers" in row for row in rows) > len(QUEUES):
            return warnings[0]
        time.sleep(0.2)
    raise ExpectationFailed(f"there was a warning by mail, with figures of all queues (waited {WAIT_SECONDS} s)")


def take_screenshots(stack: Stack, warning: Mail) -> None:
    """Take all screenshots. Raises ExpectationFailed if a page is missing or a screenshot is too large."""
    pages = screenshots()  # Playwright runs an event loop, in which Django refuses queries
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for email in (OWNER, OPERATOR):
            page = browser.new_page(base_url=stack.base_url, locale="en-GB", timezone_id="Europe/Tallinn")
            page.goto(urlsplit(stack.manage("login_link", email).strip()).path)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url(re.compile("//[^/]+/$"))
            for shot in pages:
                if shot.email == email:
                    page.set_viewport_size({"width": 1280, "height": shot.height})
                    answer = page.goto(shot.path, wait_until="networkidle")
                    if answer is None or not answer.ok:
                        raise ExpectationFailed(f"{shot.path} was there")
                    _save(page, shot.name, full_page=False)
        page = browser.new_page(viewport={"width": 700, "height": 600})
        page.set_content(warning.html)
        _save(page, "warning", full_page=True)
        browser.close()


def _save(page: Page, name: str, *, full_page: bool) -> None:
    picture = page.screenshot(full_page=full_page, animations="disabled")
    if len(picture) > MAX_BYTES:
        raise ExpectationFailed(f"{name} has {MAX_BYTES:,} bytes at most; it has {len(picture):,}")
    (PICTURES / f"{name}.png").write_bytes(picture)
    print(f"{name}.png: {len(picture):,} bytes")


def main() -> int:
    if "MAKELEVEL" in os.environ:  # make forwards no signal
        end_with_parent()
    turn_signals_into_interrupts()
    mails: list[Mail] = []
    stack = Stack(isolated(SETTINGS), var=VAR, say=print, on_mail=mails.append, fresh=True)
    try:
        with stack, contextlib.ExitStack() as consumers:
            prepare(stack, consumers)
            take_screenshots(stack, wait_for_warning(stack, mails))
    except KeyboardInterrupt:
        return 130
    except (StartError, ExpectationFailed) as error:
        print(f"✗  {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
