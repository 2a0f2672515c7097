"""``make demo``: show Guardian's main features with a real broker, messages and mails, reporting each event.

Longer than 500 lines, because it is one story from top to bottom.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pika
from rich.console import Console
from rich.markup import escape

from rabbit.addresses import split_addresses
from rabbit.errors import BrokerError, NotOnBroker
from rabbit.management import Management
from tools.mail import Mail
from tools.processes import StartError, end_with_parent, tail
from tools.rabbitmq import stomp_url_of
from tools.stack import PROJECT, Stack, configured, turn_signals_into_interrupts
from tools.stomp import Refused, StompReader

WARN, MAX = 200, 800
"""Warning threshold and deletion limit, in messages."""

STEP_SECONDS = 60
"""Timeout of each step."""

OWNER = "alice@example.org"
OPERATOR = "ops@example.org"
UNOWNED = "left-by-nobody"
OFFERING = "Compute"


class ExpectationFailed(Exception):
    """An expected event did not happen in time. The text is the expected event."""


class Publisher(threading.Thread):
    """Publishes messages over AMQP at a steady rate until it has sent ``wanted`` messages."""

    def __init__(self, url: str, exchange: str, routing_key: str) -> None:
        super().__init__(name=f"publisher to {exchange or routing_key}", daemon=True)
        self.wanted = 0
        self.error: Exception | None = None
        self._url = url
        self._exchange = exchange
        self._routing_key = routing_key
        self._ended = threading.Event()

    def run(self) -> None:
        """Publish with confirms."""
        sent = 0
        try:
            with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self._url))) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                while not self._ended.is_set():
                    if sent < self.wanted:
                        channel.basic_publish(self._exchange, self._routing_key, f"message {sent}".encode())
                        sent += 1
                    connection.process_data_events(0.008 if sent < self.wanted else 0.1)
        except (pika.exceptions.AMQPError, OSError) as error:
            self.error = error

    def end(self) -> None:
        """Stop publishing, and wait for the thread."""
        self._ended.set()
        self.join(timeout=10)


class Consumer(threading.Thread):
    """Consumes a queue over AMQP until it is empty."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(name=f"consumer of {name}", daemon=True)
        self.error: Exception | None = None
        self._url = url
        self._name = name

    def run(self) -> None:
        """Acknowledge messages until none arrives for two seconds."""
        try:
            with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self._url))) as connection:
                channel = connection.channel()
                channel.basic_qos(prefetch_count=20)
                for method, _, _ in channel.consume(self._name, inactivity_timeout=2):
                    if method is None:
                        return
                    channel.basic_ack(method.delivery_tag)
                    time.sleep(0.005)  # the work
        except (pika.exceptions.AMQPError, OSError) as error:
            self.error = error


class AmqpReader:
    """Reads a queue over AMQP, for a broker without STOMP over WebSocket."""

    def __init__(self, url: str, name: str) -> None:
        self._name = name
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()

    def take(self) -> str | None:
        """Return the body of the next message, or None."""
        _, _, body = self._channel.basic_get(self._name, auto_ack=True)
        return None if body is None else str(body, "utf-8")

    def is_closed(self) -> bool:
        """Return whether the broker has closed the connection."""
        with contextlib.suppress(pika.exceptions.AMQPError):
            self._connection.process_data_events(0)
        return not self._connection.is_open

    def stop(self) -> None:
        """Close the connection if it is open."""
        if self._connection.is_open:
            self._connection.close()


def checksum(bodies: Iterable[bytes]) -> str:
    """Return the SHA-256 of messages in this order."""
    digest = hashlib.sha256()
    for body in bodies:
        digest.update(hashlib.sha256(body).digest())
    return digest.hexdigest()


class Demo:
    """The demo, with its own vhost, two Pulse users and three queues.

    On a configured broker Guardian only guards this vhost, and the demo deletes all of it at the end.
    """

    def __init__(self, environment: dict[str, str], console: Console) -> None:
        self._var = PROJECT / "var" / "demo"
        tag = secrets.token_hex(3)
        self.vhost = f"guardian-demo-{tag}"
        self._is_shared_broker = bool(
            environment.get("RABBITMQ_MANAGEMENT_URL")
        )  # a broker that goes on without the demo
        self._suffix = f"-{tag}" if self._is_shared_broker else ""
        self._console = console
        self._arrived: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._mails: list[Mail] = []
        self._workers: list[Publisher | Consumer] = []
        self._lengths: dict[str, int] = {}
        self._listed_at = 0.0
        self._began = time.monotonic()
        self._management: Management | None = None
        self._users: dict[str, str] = {}
        self._pages = httpx.Client(follow_redirects=True, timeout=20, trust_env=False)
        self._api: httpx.Client | None = None
        self._token = ""
        self._reader: StompReader | AmqpReader | None = None
        self._agents_vhost: str | None = None
        self._agents_login: str | None = None
        self.stack = Stack(
            {**environment, **self._settings()},
            var=self._var,
            say=self.say,
            on_mail=self._arrived.put,
            fresh=True,
        )

    def _settings(self) -> dict[str, str]:
        """Return all settings that the demo depends on, to override ``.env``."""
        return {
            "DEBUG": "true",
            "DATABASE_URL": f"sqlite:///{self._var / 'guardian.sqlite3'}",
            "CELERY_BROKER_URL": "filesystem://",
            "EMAIL_URL": "",
            "DEFAULT_FROM_EMAIL": "guardian@example.org",
            "GUARDIAN_BASE_URL": "",
            "ALLOWED_HOSTS": "",
            # The default also includes `/`, which must not be guarded on a configured broker.
            "GUARDIAN_VHOSTS": self.vhost if self._is_shared_broker else "",
            "GUARDIAN_PULSE_VHOST": self.vhost,
            "GUARDIAN_WARN_QUEUE_LENGTH": str(WARN),
            "GUARDIAN_MAX_QUEUE_LENGTH": str(MAX),
            "GUARDIAN_THRESHOLD_POLICY": "static",
            "GUARDIAN_POLL_SECONDS": "1",
            "GUARDIAN_POLL_MAX_SECONDS": "5",
            "GUARDIAN_QUIET_SECONDS": "0",
            "GUARDIAN_DELETE_BRAKE": "50",
            "GUARDIAN_NAMESPACE_POLICY": "report",
            "GUARDIAN_IGNORED_QUEUES": "",
            "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
            "GUARDIAN_NO_CONSUMER_MINUTES": "0",
            "OIDC_ISSUER": "",
        }

    # Output

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the seconds since the start."""
        seconds = f"{time.monotonic() - self._began:5.1f} s"
        self._console.print(f"[dim]{seconds}[/]  [{style or 'default'}]{escape(text)}[/]")

    def heading(self, text: str) -> None:
        """Print a heading."""
        self._console.print()
        self.say(text, "bold")

    def _show_length(self, name: str, length: int | None) -> None:
        if length is None:
            self.say(f"   {name:<32} is no longer on the broker", "red")
            return
        style = "green" if length < WARN else "yellow" if length <= MAX else "red"
        bar = "█" * min(40, round(40 * length / MAX))
        self.say(f"   {name:<32} {length:>5} {bar}", style)

    # Checks
    def report_changes(self) -> None:
        """Report new mails and changed lengths. Raises ExpectationFailed or StartError after a failure."""
        self.stack.check()
        for worker in self._workers:
            if worker.error is not None:
                raise ExpectationFailed(f"The {worker.name} could go on: {worker.error!r}")
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._arrived.get_nowait()
                self._mails.append(mail)
                self.say(f"   mail to {', '.join(mail.recipients)}: {mail.subject}", "magenta")
        if time.monotonic() - self._listed_at >= 0.5:
            self._listed_at = time.monotonic()
            self._report_lengths()

    def _report_lengths(self) -> None:
        assert self._management is not None
        columns = {"disable_stats": "true", "enable_queue_totals": "true", "columns": "name,messages"}
        rows = self._management.list_queues(self.vhost, columns)
        # A new queue may have no length yet.
        lengths = {str(row["name"]): int(row["messages"]) for row in rows if row.get("messages") is not None}
        for name, length in lengths.items():
            if self._lengths.get(name) != length:
                self._show_length(name, length)
        for name in self._lengths.keys() - {row["name"] for row in rows}:
            self._show_length(name, None)
        self._lengths = lengths

    def expect(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, and report it. Raises ExpectationFailed after ``STEP_SECONDS``."""
        deadline = time.monotonic() + STEP_SECONDS
        while not happened():
            if time.monotonic() > deadline:
                raise ExpectationFailed(f"{what} (waited {STEP_SECONDS} s)")
            time.sleep(0.05)
            self.report_changes()
        self.say(f"✓  {what}", "bold green")

    def _page_contains(self, name: str, words: str) -> bool:
        """Return whether the page linked in the owner's mail about this queue contains these words."""
        for mail in self._mails:
            if name in mail.subject and OWNER in mail.recipients:
                link = re.search(r"http\S+/queues/\S+/", mail.text)
                return link is not None and words in self._read(link.group())
        return False

    def _read(self, url: str) -> str:
        """Return the text of a page as the owner sees it."""
        try:
            page = self._pages.get(url)
        except httpx.HTTPError as error:
            raise ExpectationFailed(f"{url} could be read: {error!r}") from error
        if page.status_code != 200:
            raise ExpectationFailed(f"{url} answered 200; it was {page.status_code}")
        return page.text

    def _sign_in(self, email: str) -> None:
        """Sign in by the button of a sign-in link."""
        link = self._link(email)
        self._read(link)
        self._pages.post(link, data={"csrfmiddlewaretoken": self._pages.cookies["csrftoken"]}).raise_for_status()

    def _is_gone(self, name: str) -> bool:
        return name not in self._lengths

    def _has_mail(self, kind: str, name: str, recipient: str) -> bool:
        """Return whether this recipient got a mail of this kind about this queue."""
        return any(
            mail.message["X-Guardian-Kind"] == kind and name in mail.subject and recipient in mail.recipients
            for mail in self._mails
        )

    # The demo

    def prepare(self) -> None:
        """Start the stack, and create the vhost, owners, Pulse users and queues."""
        environment = self.stack.environment
        if environment.get("RABBITMQ_MANAGEMENT_URL") and not environment.get("RABBIT_URL"):
            raise StartError("RABBITMQ_MANAGEMENT_URL is set; set RABBIT_URL too, to the same broker's AMQP address.")
        self.heading("Preparing the demo")
        self.stack.prepare()
        try:
            self._management = Management(environment["RABBITMQ_MANAGEMENT_URL"])
        except ValueError as error:
            raise StartError(f"RABBITMQ_MANAGEMENT_URL can't be used: {error}") from error
        self._management.create_vhost(self.vhost)
        self.stack.manage("create_owner", OWNER, "--vouched")
        self.stack.manage("create_owner", OPERATOR, "--operator")
        self._create_pulse_users()
        self.say(f"{OWNER} owns the Pulse users {' and '.join(self._users)}; {OPERATOR} is the operator.")
        self._declare_queues()
        self.stack.manage("monitor_queues", "--once")  # stores the empty queues, so that Guardian can compute rates
        self.stack.start()
        self.say(f"The web process, the guard, a worker and beat are running: {self.stack.base_url}")
        self.say(f"Guardian runs a pass every second, warns at {WARN} messages and deletes above {MAX}.")
        self._sign_in(OWNER)
        self._show_links()

    def _link(self, email: str) -> str:
        return self.stack.manage("login_link", email).strip()

    def _show_links(self) -> None:
        """Print sign-in links."""
        self.say("Follow the demo on Guardian's pages. Each link signs you in once, within ten minutes:")
        for email, who in ((OWNER, "who owns two of the queues"), (OPERATOR, "the operator")):
            self.say(f"   as {email}, {who}: {self._link(email)}", "cyan")

    def _create_pulse_users(self) -> None:
        os.environ.update(self.stack.environment)
        os.environ["DJANGO_SETTINGS_MODULE"] = "guardian_site.settings"
        import django

        django.setup()
        from accounts.models import Owner
        from accounts.pulse_users.creation import create_pulse_user

        owner = Owner.objects.get(email=OWNER)
        self._agents_vhost = owner.uuid.hex
        for name in (f"alice-builds{self._suffix}", f"alice-nightly{self._suffix}"):
            _, self._users[name] = create_pulse_user(name, owners=[owner])

    def _address(self, user: str | None = None) -> str:
        """Return the AMQP URL of the demo's vhost, for a Pulse user or by default for the configured administrator."""
        configured = urlsplit(split_addresses(self.stack.environment["RABBIT_URL"])[0])
        host = configured.netloc.rpartition("@")[2]
        if user is not None:
            configured = configured._replace(netloc=f"{user}:{quote(self._users[user])}@{host}")
        return configured._replace(path=f"/{quote(self.vhost, safe='')}").geturl()

    @contextlib.contextmanager
    def _channel(self, user: str | None = None) -> "Iterator[pika.adapters.blocking_connection.BlockingChannel]":
        try:
            connection = pika.BlockingConnection(pika.URLParameters(self._address(user)))
        except (pika.exceptions.AMQPError, OSError) as error:
            raise StartError(f"Can't connect over AMQP at RABBIT_URL: {error!r}") from error
        with contextlib.closing(connection):
            yield connection.channel()

    def _declare_queues(self) -> None:
        """Declare a queue and an exchange as each Pulse user, and an unpatterned queue as the administrator."""
        for user in self._users:
            with self._channel(user) as channel:
                channel.exchange_declare(f"exchange/{user}/done", "topic", durable=True)
                channel.queue_declare(f"queue/{user}/done", durable=True)
                channel.queue_bind(f"queue/{user}/done", f"exchange/{user}/done", "#")
        with self._channel() as channel:
            channel.queue_declare(UNOWNED, durable=True)

    def run(self) -> None:
        """Run the demo. Raises ExpectationFailed."""
        began = time.monotonic()
        read, unread = self._users
        consumed, growing = f"queue/{read}/done", f"queue/{unread}/done"
        publishers = {
            consumed: Publisher(self._address(read), f"exchange/{read}/done", "linux.opt"),
            growing: Publisher(self._address(unread), f"exchange/{unread}/done", "linux.debug"),
            UNOWNED: Publisher(self._address(), "", UNOWNED),
        }
        self._workers += publishers.values()
        for publisher in publishers.values():
            publisher.wanted = WARN + 50
            publisher.start()

        self.heading("Messages arrive, and no consumer reads them")
        self.expect(f"{OWNER} is warned about {consumed}", lambda: self._has_mail("warning", consumed, OWNER))
        self.expect(f"{OWNER} is warned about {growing}", lambda: self._has_mail("warning", growing, OWNER))
        self.expect(
            f"Signed in, {OWNER} follows the mail's link and reads that {growing} is over its warning threshold",
            lambda: self._page_contains(growing, "over warning threshold"),
        )
        self.expect(
            f"{OPERATOR} gets copies, and is warned about the unowned queue {UNOWNED}",
            lambda: all(self._has_mail("warning", name, OPERATOR) for name in publishers),
        )

        self.heading(f"A consumer reads {consumed}")
        consumer = Consumer(self._address(read), consumed)
        self._workers.append(consumer)
        consumer.start()
        self.expect(f"{consumed} is empty", lambda: self._lengths.get(consumed) == 0)
        self.expect(
            f"{OWNER} is notified that it is back to normal", lambda: self._has_mail("recovery", consumed, OWNER)
        )

        self.heading(f"No consumer reads {growing} and {UNOWNED}, and they keep growing")
        for name in (growing, UNOWNED):
            publishers[name].wanted = MAX + 150
        for name in (growing, UNOWNED):
            self.expect(f"{name} is deleted from the broker", partial(self._is_gone, name))
        self.expect(
            f"{OWNER} is notified that {growing} was deleted", lambda: self._has_mail("deletion", growing, OWNER)
        )
        self.expect(
            f"The page of {growing} says that Guardian deleted it",
            lambda: self._page_contains(growing, "Guardian deleted this queue"),
        )
        self.expect(
            f"{OPERATOR} is notified of both deletions",
            lambda: self._has_mail("deletion", growing, OPERATOR) and self._has_mail("deletion", UNOWNED, OPERATOR),
        )
        self.expect(f"{consumed} still exists", lambda: consumed in self._lengths)
        self.expect(
            f"Only {OPERATOR} was notified about {UNOWNED}",
            lambda: {to for mail in self._mails if UNOWNED in mail.subject for to in mail.recipients} == {OPERATOR},
        )
        self._bring_back(unread, growing)
        self._run_agent_story()
        self.heading(f"The demo is complete: {len(self._mails)} mails in {time.monotonic() - began:.0f} s.")

    def _create_token(self) -> None:
        """Create a token of the owner, for requests to the REST API."""
        self._token = self.stack.manage("create_token", OWNER, "--scope", "all").strip()
        self._api = httpx.Client(
            base_url=f"{self.stack.base_url}/api/",
            headers={"Authorization": f"Token {self._token}"},
            timeout=20,
            trust_env=False,
        )

    def _bring_back(self, user: str, name: str) -> None:
        """Show how the owner of a deleted queue replays its messages, and compare them with those that were sent."""
        self.heading(f"{OWNER} brings the messages of {name} back")
        self._create_token()
        self.say(f"With a token of {OWNER}, the REST API gives the archive of the deleted queue:")
        archive = self._request(f"archives/?queue={quote(name)}", method="GET")[0]
        count, path = archive["messages"], f"archives/{archive['uuid']}"
        sent = checksum(f"message {number}".encode() for number in range(count))
        self.say(f"   the publisher's first {count} messages: SHA-256 {sent}", "cyan")
        lines = self._read(f"{self.stack.base_url}/api/{path}/download/").splitlines()
        archived = checksum(json.loads(line)["body"].encode() for line in lines)
        self.say(f"   downloaded from the archive:         SHA-256 {archived}", "cyan")
        self.expect(f"Guardian archived {count} messages, in their order and unchanged", lambda: archived == sent)
        if archive["dropped"]:
            self.say(f"{archive['dropped']} more arrived while the queue was deleted, and are lost; the mail says so.")
        self.say(f"{OWNER} declares the queue again and starts a consumer.")
        self.say(f"The queue may have {MAX} messages, so the archive is replayed in two parts.")
        parts = [(1, count // 2), (count // 2 + 1, count)]
        with self._channel(user) as channel:
            channel.queue_declare(name, durable=True)
            arrived: list[bytes] = []
            for first, last in parts:
                to = {"to": {"queue": name}, "first": first, "last": last}
                replay = self._request(f"{path}/replay/", to)
                for method, _, body in channel.consume(name, auto_ack=True, inactivity_timeout=STEP_SECONDS):
                    if method is None:
                        raise ExpectationFailed(f"Messages {first} to {last} arrive (waited {STEP_SECONDS} s)")
                    arrived.append(body)
                    if len(arrived) == last:
                        break
                channel.cancel()
                progress = f"{path}/replays/{replay['uuid']}/"
                self.expect(
                    f"Messages {first} to {last} arrived, and the replay is done",
                    lambda: self._request(progress, method="GET")["state"] == "done",  # noqa: B023
                )
        self.say(f"   consumed from the queue:             SHA-256 {checksum(arrived)}", "cyan")
        self.expect(f"All {count} messages are back, in their order and unchanged", lambda: checksum(arrived) == sent)

    def _run_agent_story(self) -> None:
        """Show how an agent registers a queue over REST, receives an event and deletes its subscription."""
        self.heading(f"An agent of {OWNER} subscribes to orders for the offering {OFFERING}")
        offering = str(uuid.uuid4())
        self.stack.manage(
            "create_offering", OFFERING, "--uuid", offering, *("--member", OWNER), *("--publisher", OWNER)
        )
        self.say(f"With the token of {OWNER} it registers a queue over the REST API:")
        identity = self._request("marketplace-site-agent-identities/", {"offering": offering, "name": "demo-agent"})
        subscription = self._request(
            f"marketplace-site-agent-identities/{identity['uuid']}/register_event_subscription/",
            {"observable_object_type": "order"},
        )
        self._agents_login = subscription["uuid"]
        registered = self._request(
            f"event-subscriptions/{subscription['uuid']}/create_queue/",
            {"offering_uuid": offering, "object_type": "order"},
        )
        vhost, name = registered["vhost"], registered["queue_name"]
        self.say(f"   {name}")
        wanted = {"x-max-length", "x-message-ttl", "x-dead-letter-routing-key"}
        self.expect(
            "It is on the broker, with a length limit, a message TTL and a dead-letter queue",
            lambda: wanted <= self._arguments(vhost, name).keys(),
        )
        self._reader = self._read_as_agent(vhost, subscription["uuid"], self._token, name)
        page = f"{self.stack.base_url}/subscriptions/"
        self.expect(
            f"Signed in, {OWNER} sees the agent and its queue on {page}", lambda: self._shows(page, "demo-agent", name)
        )

        sent = {"order_uuid": uuid.uuid4().hex, "order_state": "done"}
        self.say(f"A publisher sends an event about an order: {json.dumps(sent)}")
        published = self._request(f"offerings/{offering}/events/", {"object_type": "order", "payload": sent})
        self.expect("Guardian published it to one queue", lambda: published["delivered"] == 1)
        self.expect("The agent received it", lambda: self._agent_received(sent))

        self.say("The agent deletes its subscription.")
        self._request(f"event-subscriptions/{subscription['uuid']}/", method="DELETE")
        self.expect("Its queue is deleted from the broker", lambda: not self._arguments(vhost, name))
        self.expect("Its connection is closed, and its login is deleted", self._agent_is_disconnected)

    def _request(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """Send a request to the REST API with the owner's token, and return the answer. Raises ExpectationFailed."""
        assert self._api is not None
        try:
            answer = self._api.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ExpectationFailed(f"{method} {path} was answered: {error!r}") from error
        if not answer.is_success:
            raise ExpectationFailed(f"{method} {path} succeeded; it answered {answer.status_code}: {answer.text}")
        return answer.json() if answer.content else {}

    def _read_as_agent(self, vhost: str, login: str, token: str, name: str) -> StompReader | AmqpReader:
        """Connect as the agent, with the subscription's login and the token as password."""
        assert self._management is not None
        host = urlsplit(split_addresses(self.stack.environment["RABBITMQ_MANAGEMENT_URL"])[0]).hostname or ""
        if self.stack.node is not None:
            url = self.stack.node.stomp_url
        else:
            url = stomp_url_of(self._management.overview(), host)
        if url is not None:
            logging.getLogger("stomp.py").setLevel(logging.WARNING)  # it logs each step of connecting
            self.say(f"It reads the queue with STOMP over WebSocket at {url}, with its token as password.")
            try:
                return StompReader(url, vhost=vhost, login=login, passcode=token, queue_name=name).start()
            except Refused as error:
                raise ExpectationFailed(f"The agent could read its queue: {error}") from error
        logging.getLogger("pika").setLevel(logging.CRITICAL)  # the demo expects that the connection is closed
        self.say("This broker has no STOMP over WebSocket, so it reads the queue with AMQP and its token.")
        configured = urlsplit(split_addresses(self.stack.environment["RABBIT_URL"])[0])
        netloc = f"{login}:{quote(token, safe='')}@{configured.netloc.rpartition('@')[2]}"
        try:
            return AmqpReader(configured._replace(netloc=netloc, path=f"/{quote(vhost, safe='')}").geturl(), name)
        except (pika.exceptions.AMQPError, OSError) as error:
            raise ExpectationFailed(f"The agent could read its queue: {error!r}") from error

    def _agent_received(self, sent: dict[str, str]) -> bool:
        assert self._reader is not None
        body = self._reader.take()
        if body is None:
            return False
        self.say(f"   {body}", "cyan")
        return bool(sent.items() <= json.loads(body).items())

    def _agent_is_disconnected(self) -> bool:
        assert self._management is not None
        assert self._agents_login is not None
        assert self._reader is not None
        if not self._reader.is_closed():
            return False
        try:
            self._management.user(self._agents_login)
        except NotOnBroker:
            return True
        return False

    def _arguments(self, vhost: str, name: str) -> dict[str, Any]:
        """Return a queue's arguments on the broker; empty if it does not exist."""
        assert self._management is not None
        try:
            return dict(self._management.queue(vhost, name)["arguments"])
        except NotOnBroker:
            return {}

    def _shows(self, url: str, *names: str) -> bool:
        """Return whether a page contains these names, ignoring its line break opportunities."""
        text = self._read(url).replace("<wbr>", "")
        return all(name in text for name in names)

    def show_locations(self) -> None:
        """Print the addresses of Guardian and RabbitMQ, and the directories of mails and logs."""
        self.say(f"Guardian:  {self.stack.base_url}")
        if self.stack.node is not None:
            self.say(f"RabbitMQ:  {self.stack.node.management_url}")
        self.say(f"The mails: {self._var / 'mail'}")
        self.say(f"The logs:  {self.stack.logs}")

    def run_until_interrupted(self) -> None:
        """Report changes until Ctrl-C."""
        self._show_links()
        self.say("Guardian keeps running. Ctrl-C stops it and everything that it started.", "bold")
        while True:
            self.report_changes()
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop everything, and delete the demo's objects from a configured broker."""
        for worker in self._workers:
            if isinstance(worker, Publisher) and worker.is_alive():
                worker.end()
        if self._reader is not None:
            self._reader.stop()
        if self._api is not None:
            self._api.close()
        self._pages.close()
        self.stack.stop()
        if self._is_shared_broker and self._management is not None:
            vhosts = (self.vhost, self._agents_vhost)
            users = (*self._users, self._agents_login)
            for remove, name in (
                *((self._management.delete_vhost, vhost) for vhost in vhosts if vhost is not None),
                *((self._management.delete_user, user) for user in users if user is not None),
            ):
                try:
                    remove(name)
                except NotOnBroker:
                    pass
                except BrokerError as error:
                    self.say(f"{name} is left on the broker: {error}", "red")


def main() -> int:
    """Run the demo. Return 1 if something did not start or did not happen, 130 if interrupted."""
    if "MAKELEVEL" in os.environ:  # make forwards no signal
        end_with_parent()
    turn_signals_into_interrupts()
    console = Console(highlight=False, soft_wrap=True)
    is_unattended = os.environ.get("CI", "").lower() in ("1", "true", "yes") or not sys.stdout.isatty()
    demo = Demo(configured(), console)
    is_done = False
    try:
        demo.prepare()
        demo.run()
        is_done = True
        demo.show_locations()
        if is_unattended:
            demo.say("The demo ends here, because nobody watches it on a terminal. In one, it runs until Ctrl-C.")
        else:
            demo.run_until_interrupted()
    except KeyboardInterrupt:
        demo.say("Stopping.")
        return 0 if is_done else 130
    except ExpectationFailed as error:
        demo.say(f"✗  This did not happen: {error}", "bold red")
        for name in ("web", "guard", "worker", "beat"):
            console.print(f"\nThe end of {name}'s log:\n{escape(tail(demo.stack.logs / f'{name}.log'))}")
        return 1
    except (StartError, BrokerError) as error:
        demo.say(f"✗  {error}", "bold red")
        return 1
    finally:
        demo.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
