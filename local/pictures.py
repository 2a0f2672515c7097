"""``make pictures``: the pictures of the documents, taken of the running application.

It starts Guardian with a RabbitMQ and a mail server of its own, makes people, queues, messages and an agent there, and
takes the pictures with Chromium. What can't wait is written into the database: the lengths of the hour before.
"""

import argparse
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pika
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.markup import escape

from local.demo import STEP_SECONDS, DidNotHappen
from local.mail import Mail
from local.processes import StartError, end_with_parent
from local.stack import PROJECT, Stack, documented_defaults, turn_signals_into_interrupts
from local.stomp import Refused, StompReader

PICTURES = PROJECT / "docs" / "pictures"
MOST_BYTES = 150_000
WIDTH = 1000
"""In CSS pixels, of which one is one of the picture's: text stays readable where a page shows it as wide as that."""

CHROMIUM = "/usr/bin/chromium"
OWNER = "alice@example.org"
OPERATOR = "ops@example.org"
OFFERING = "Compute in Tartu"


class Filled(NamedTuple):
    """A queue as the pictures show it, in messages: its length now, an hour ago, and whether somebody reads it."""

    account: str
    name: str
    now: int
    before: int
    is_read: bool = True


QUEUES = (
    Filled("alice-builds", "linux", 140, 90),
    Filled("alice-builds", "windows", 2_600, 1_900),
    Filled("alice-builds", "macos", 0, 12),
    Filled("alice-nightly", "reports", 5_900, 700, is_read=False),
    Filled("alice-nightly", "mail", 31, 40),
    Filled("bob-metrics", "raw", 1_250, 1_100),
    Filled("bob-metrics", "daily", 7, 3),
)
LONG = "queue/alice-nightly/reports"
UNOWNED = "left-by-nobody"


class Shot(NamedTuple):
    """A picture: its name, whose page it is of, where that is, how much of it, from its top (0: all), and its width."""

    name: str
    email: str
    path: str
    height: int = 0
    width: int = WIDTH


class Studio:
    """Guardian with what the pictures show."""

    def __init__(self, console: Console, var: Path) -> None:
        """Choose; nothing runs yet. Files go under ``var``."""
        self._console = console
        self._mails: list[Mail] = []
        self._readers: list[Any] = []
        self._passwords: dict[str, str] = {}
        self.stack = Stack(
            {
                **{name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")},
                **documented_defaults(),
                "GUARDIAN_VHOSTS": "",
                "GUARDIAN_POLL_SECONDS": "1",
                "GUARDIAN_QUIET_SECONDS": "0",
                "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
                "DEFAULT_FROM_EMAIL": "guardian@example.org",
                "CELERY_BROKER_URL": "filesystem://",
                "EMAIL_URL": "",
                "ALLOWED_HOSTS": "",
            },
            var=var,
            say=self.say,
            on_mail=self._mails.append,
            fresh=True,
        )

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(escape(text))

    def prepare(self) -> None:
        """Start all of it, and fill it."""
        self.stack.prepare()
        assert self.stack.node is not None
        self.stack.node.ctl("set_cluster_name", "rabbit@example.org")
        self.stack.manage("create_owner", OWNER, "--vouched")
        self.stack.manage("create_owner", "bob@example.org", "--vouched")
        self.stack.manage("create_owner", OPERATOR, "--operator")
        os.environ.update(self.stack.environment)
        os.environ["DJANGO_SETTINGS_MODULE"] = "guardian_site.settings"
        import django

        django.setup()
        logging.getLogger("stomp.py").setLevel(logging.WARNING)  # it tells of each step of connecting
        self._make_accounts()
        self._make_queues()
        self.stack.manage("monitor_queues", "--once")
        self._write_the_hour_before()
        self._fill_queues()
        self.stack.start()
        self._register_an_agent()
        self._wait_for("a warning by mail", lambda: self._warning() is not None)
        self._wait_for("figures in the management plugin", self._has_figures)
        self._make_channel()

    def _make_accounts(self) -> None:
        from accounts.models import Owner
        from accounts.pulse_users import make_pulse_user

        alice, bob = Owner.objects.get(email=OWNER), Owner.objects.get(email="bob@example.org")
        for account in dict.fromkeys(queue.account for queue in QUEUES):
            owners = [bob] if account.startswith("bob") else [alice]
            _, self._passwords[account] = make_pulse_user(account, owners=owners)

    def _make_channel(self) -> None:
        """Make it last, so that nothing is sent to a host that isn't there."""
        from accounts.models import Owner
        from queues.channels import make_channel

        make_channel(Owner.objects.get(email=OWNER), "The team's room", "https://chat.example.org/hooks/builds")

    @contextlib.contextmanager
    def _channel(self, account: str = "") -> "Iterator[pika.adapters.blocking_connection.BlockingChannel]":
        with contextlib.closing(self._connect(account)) as connection:
            yield connection.channel()

    def _connect(self, account: str = "") -> pika.BlockingConnection:
        url = urlsplit(self.stack.environment["RABBIT_URL"])
        if account:
            host = url.netloc.rpartition("@")[2]
            url = url._replace(netloc=f"{account}:{self._passwords[account]}@{host}")
        return pika.BlockingConnection(pika.URLParameters(f"{url.geturl().rstrip('/')}/%2F"))

    def _make_queues(self) -> None:
        for queue in QUEUES:
            with self._channel(queue.account) as channel:
                name, exchange = f"queue/{queue.account}/{queue.name}", f"exchange/{queue.account}/done"
                channel.exchange_declare(exchange, "topic", durable=True)
                channel.queue_declare(name, durable=True)
                channel.queue_bind(name, exchange, f"{queue.name}.#")
            if queue.is_read:
                # It takes one message, and is slow with that.
                reader = self._connect(queue.account)
                self._readers.append(reader)
                reading = reader.channel()
                reading.basic_qos(prefetch_count=1)
                reading.basic_consume(name, lambda *_: None)
        with self._channel() as channel:
            channel.queue_declare(UNOWNED, durable=True)

    def _fill_queues(self) -> None:
        with self._channel() as channel:
            for queue in QUEUES:
                for number in range(queue.now):
                    body = f"message {number}".encode()
                    channel.basic_publish(f"exchange/{queue.account}/done", f"{queue.name}.opt", body)
            for number in range(420):
                channel.basic_publish("", UNOWNED, f"message {number}".encode())

    def _write_the_hour_before(self) -> None:
        from django.utils import timezone

        from queues.models import Pass, Queue, QueueSample

        now = timezone.now()
        QueueSample.objects.all().delete()  # they were empty a moment ago
        lengths = {f"queue/{queue.account}/{queue.name}": (queue.before, queue.now) for queue in QUEUES}
        samples, passes = [], []
        for queue in Queue.objects.filter(name__in=lengths):
            before, last = lengths[queue.name]
            for minute in range(60):
                # Work comes in waves.
                wave = math.sin(minute / 4 + queue.pk) + math.sin(minute / 1.7) / 2
                length = round(before + (last - before) * minute / 60 + wave * max(last, before) / 40)
                samples.append(QueueSample(queue=queue, at=now - timedelta(minutes=60 - minute), length=max(length, 0)))
        for minute in range(60):
            seconds = 0.03 + (minute * 7 % 5) / 200
            at = now - timedelta(minutes=60 - minute)
            passes.append(Pass(at=at, queues=len(QUEUES) + 1, seconds=seconds, listing_seconds=seconds * 0.7))
        QueueSample.objects.bulk_create(samples)
        Pass.objects.bulk_create(passes)
        Queue.objects.filter(name__in=lengths).update(first_seen=now - timedelta(days=12))

    def _register_an_agent(self) -> None:
        assert self.stack.node is not None
        offering = self.stack.manage("create_offering", OFFERING, "--member", OWNER, "--publisher", OWNER).strip()
        token = self.stack.manage("create_token", OWNER).strip()
        headers = {"Authorization": f"Token {token}"}
        with httpx.Client(base_url=f"{self.stack.base_url}/api/", headers=headers, timeout=30, trust_env=False) as rest:

            def ask(path: str, **body: Any) -> dict[str, Any]:
                answer = rest.post(path, json=body)
                if not answer.is_success:
                    raise DidNotHappen(f"POST {path} was done; it was {answer.status_code}: {answer.text}")
                return dict(answer.json())

            identity = ask("agent-identities/", name="orders-to-slurm", offering=offering, version="1.4")
            path = f"agent-identities/{identity['uuid']}/register_queue/"
            registered = ask(path, object_types=["order", "resource"])
            other = ask("agent-identities/", name="accounts-to-ldap", offering=offering, version="0.9")
            ask(f"agent-identities/{other['uuid']}/register_event_subscription/", observable_object_type="user_role")
        url = self.stack.node.stomp_url
        assert url is not None
        login, name = registered["rmq_username"], registered["queue_name"]
        reader = StompReader(url, vhost=registered["vhost"], login=login, passcode=token, queue_name=name)
        self._readers.append(reader.start())

    def _warning(self) -> Mail | None:
        return next((mail for mail in list(self._mails) if OWNER in mail.recipients and LONG in mail.subject), None)

    def _has_figures(self) -> bool:
        from queues.models import Pass
        from rabbit import connections

        names = {queue["name"] for queue in connections.management().list_queues("/", {}) if "consumers" in queue}
        return len(names) > len(QUEUES) and Pass.objects.count() > 75

    def _wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STEP_SECONDS
        while not happened():
            self.stack.check()
            for reader in self._readers:
                if isinstance(reader, pika.BlockingConnection):
                    reader.process_data_events(0)
            if time.monotonic() > deadline:
                raise DidNotHappen(f"there was {what} (waited {STEP_SECONDS} s)")
            time.sleep(0.2)

    def shots(self) -> list[Shot]:
        """Return what is to be taken of pages."""
        from queues.models import Queue

        page = f"/queues/{Queue.objects.get(name=LONG).uuid}/"
        return [
            Shot("queues", OWNER, "/queues/"),
            Shot("queue", OWNER, page, 830),
            Shot("pulse-users", OWNER, "/pulse-users/"),
            Shot("settings", OWNER, "/settings/", 770),
            Shot("subscriptions", OWNER, "/subscriptions/"),
            Shot("admin", OPERATOR, "/admin/", 940, 1200),
            Shot("api", OWNER, "/api/docs/", 640),
        ]

    def take(self, folder: Path) -> None:
        """Take all pictures; raises DidNotHappen where one isn't what it should be."""
        links = {email: urlsplit(self.stack.manage("login_link", email).strip()).path for email in (OWNER, OPERATOR)}
        shots, mail = self.shots(), self._warning()
        assert mail is not None
        folder.mkdir(parents=True, exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            for email, link in links.items():
                context = browser.new_context(
                    base_url=self.stack.base_url, locale="en-GB", color_scheme="light", timezone_id="Europe/Tallinn"
                )
                page = context.new_page()
                page.goto(link)
                for shot in shots:
                    if shot.email == email:
                        page.set_viewport_size({"width": shot.width, "height": shot.height or 600})
                        answer = page.goto(shot.path, wait_until="networkidle")
                        if answer is None or not answer.ok:
                            raise DidNotHappen(f"{shot.path} was there")
                        self._keep(page, folder / f"{shot.name}.png", whole=not shot.height)
                context.close()
            page = browser.new_page(viewport={"width": 700, "height": 600}, color_scheme="light")
            page.set_content(mail.html)
            self._keep(page, folder / "warning.png", whole=True)
            browser.close()

    def _keep(self, page: Page, path: Path, *, whole: bool) -> None:
        picture = page.screenshot(full_page=whole, animations="disabled")
        if len(picture) > MOST_BYTES:
            raise DidNotHappen(f"{path.name} has {MOST_BYTES:,} bytes at most; it has {len(picture):,}")
        path.write_bytes(picture)
        self.say(f"{path.name}: {len(picture):,} bytes")

    def stop(self) -> None:
        """End everything."""
        for reader in self._readers:
            with contextlib.suppress(pika.exceptions.AMQPError):
                reader.stop() if isinstance(reader, StompReader) else reader.close()
        self.stack.stop()


def main() -> int:
    """Take the pictures; gives 1 when something didn't start or didn't happen, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m local.pictures", description="Take the pictures of the documents.")
    parser.add_argument("--to", type=Path, default=PICTURES, metavar="FOLDER", help="where they are written")
    parser.add_argument("--var", type=Path, default=PROJECT / "var" / "pictures", help="where everything else goes")
    wanted = parser.parse_args()
    if "MAKELEVEL" in os.environ:  # make has nobody else to end
        end_with_parent()
    turn_signals_into_interrupts()
    studio = Studio(Console(highlight=False, soft_wrap=True), wanted.var)
    try:
        studio.prepare()
        studio.take(wanted.to)
    except KeyboardInterrupt:
        return 130
    except (StartError, DidNotHappen, Refused) as error:
        studio.say(f"✗  {error}")
        return 1
    finally:
        studio.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
