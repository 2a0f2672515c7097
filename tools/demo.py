"""``make demo``: show Guardian's main features with a private broker, real messages and mails, reporting each event.

The story begins with `tell`, and reads from top to bottom. What is above it watches the broker, mails and pages.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any
from urllib.parse import quote

import httpx
import pika
from pika.adapters.blocking_connection import BlockingChannel
from rich.console import Console
from rich.markup import escape

from rabbit.errors import BrokerError, NotOnBroker
from rabbit.management import Management
from tools.mail import Mail
from tools.processes import StartError, end_with_parent, tail
from tools.stack import PROJECT, Stack, isolated, turn_signals_into_interrupts
from tools.stomp import Refused, StompReader

WARN, MAX = 200, 800
"""Warning threshold and deletion limit, in messages."""

STEP_SECONDS = 60
"""Timeout of each step."""

OWNER = "alice@example.org"
OPERATOR = "ops@example.org"
CONSUMED, GROWING = (f"queue/{user}/done" for user in ("alice-builds", "alice-nightly"))
UNOWNED = "left-by-nobody"
OFFERING = "Compute"
VAR = PROJECT / "var" / "demo"

SETTINGS = {
    "DEBUG": "true",
    "DATABASE_URL": f"sqlite:///{VAR / 'guardian.sqlite3'}",
    "DEFAULT_FROM_EMAIL": "guardian@example.org",
    "GUARDIAN_WARN_QUEUE_LENGTH": str(WARN),
    "GUARDIAN_MAX_QUEUE_LENGTH": str(MAX),
    "GUARDIAN_POLL_SECONDS": "1",
    "GUARDIAN_POLL_MAX_SECONDS": "5",
    "GUARDIAN_QUIET_SECONDS": "0",
    "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
}

console = Console(highlight=False, soft_wrap=True)
began = time.monotonic()


class ExpectationFailed(Exception):
    """An expected event did not happen in time. The text is the expected event."""


def say(text: str, style: str = "") -> None:
    console.print(f"[dim]{time.monotonic() - began:5.1f} s[/]  [{style or 'default'}]{escape(text)}[/]")


def heading(text: str) -> None:
    console.print()
    say(text, "bold")


def show_length(name: str, length: int | None) -> None:
    """Print the length of a queue; None: it is gone."""
    if length is None:
        say(f"   {name:<32} is no longer on the broker", "red")
        return
    style = "green" if length < WARN else "yellow" if length <= MAX else "red"
    say(f"   {name:<32} {length:>5} {'█' * min(40, round(40 * length / MAX))}", style)


def checksum(bodies: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\n".join(bodies)).hexdigest()


@contextlib.contextmanager
def channel_at(url: str) -> Iterator[BlockingChannel]:
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(f"{url}/%2F"))) as connection:
        yield connection.channel()


def publish(url: str, exchange: str, routing_key: str, numbers: range) -> None:
    """Publish messages with confirms, about a hundred a second."""
    with channel_at(url) as channel:
        channel.confirm_delivery()
        for number in numbers:
            channel.basic_publish(exchange, routing_key, f"message {number}".encode())
            channel.connection.sleep(0.008)


def consume(url: str, name: str) -> list[bytes]:
    """Acknowledge messages until none arrives for two seconds, and return them."""
    bodies: list[bytes] = []
    with channel_at(url) as channel:
        channel.basic_qos(prefetch_count=20)
        for method, _, body in channel.consume(name, inactivity_timeout=2):
            if method is None:
                break
            bodies.append(body)
            channel.basic_ack(method.delivery_tag)
            time.sleep(0.005)  # the work
    return bodies


class Demo:
    """What the demo watches and uses: mails, the lengths on the broker, the owner's pages and the REST API."""

    def __init__(self, stack: Stack, arrived: "queue.SimpleQueue[Mail]", threads: ThreadPoolExecutor) -> None:
        """Create the demo. ``arrived`` gets each mail from another thread."""
        self.stack = stack
        self.mails: list[Mail] = []
        self.lengths: dict[str, int] = {}
        self.browser = httpx.Client(follow_redirects=True, timeout=20, trust_env=False)
        self.api = httpx.Client(timeout=20, trust_env=False)
        self._arrived = arrived
        self._threads = threads
        self._running: list[Future[object]] = []
        self._listed_at = 0.0

    @cached_property
    def management(self) -> Management:
        return Management(self.stack.environment["RABBITMQ_MANAGEMENT_URL"])

    def run(self, do: Callable[..., object], *arguments: object) -> None:
        """Call a function in another thread. Its error ends the demo."""
        self._running.append(self._threads.submit(do, *arguments))

    def finished(self) -> list[bool]:
        """Return for each thread whether it is done."""
        return [one.done() for one in self._running]

    def expect(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, and report it. Raises ExpectationFailed after ``STEP_SECONDS``."""
        deadline = time.monotonic() + STEP_SECONDS
        while not happened():
            if time.monotonic() > deadline:
                raise ExpectationFailed(f"{what} (waited {STEP_SECONDS} s)")
            time.sleep(0.05)
            self.report_changes()
        say(f"✓  {what}", "bold green")

    def report_changes(self) -> None:
        """Report new mails and changed lengths. Raises ExpectationFailed or StartError after a failure."""
        self.stack.check()
        for thread in self._running:
            if thread.done() and (error := thread.exception()):
                raise ExpectationFailed(f"Publishers and consumers could go on: {error!r}")
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._arrived.get_nowait()
                self.mails.append(mail)
                say(f"   mail to {', '.join(mail.recipients)}: {mail.subject}", "magenta")
        if time.monotonic() - self._listed_at >= 0.5:
            self._listed_at = time.monotonic()
            self._report_lengths()

    def _report_lengths(self) -> None:
        columns = {"disable_stats": "true", "enable_queue_totals": "true", "columns": "name,messages"}
        rows = self.management.list_queues("/", columns)
        # A new queue may have no length yet.
        lengths = {str(row["name"]): int(row["messages"]) for row in rows if row.get("messages") is not None}
        for name, length in lengths.items():
            if self.lengths.get(name) != length:
                show_length(name, length)
        for name in self.lengths.keys() - {row["name"] for row in rows}:
            show_length(name, None)
        self.lengths = lengths

    def has_mail(self, kind: str, name: str, recipient: str) -> bool:
        """Return whether this recipient got a mail of this kind about this queue.

        If the machine is busy, and the queue grows past its threshold from one pass to the next, a last call warns.
        """
        kinds = ("warning", "last-call") if kind == "warning" else (kind,)
        return any(
            mail.message["X-Guardian-Kind"] in kinds and name in mail.subject and recipient in mail.recipients
            for mail in self.mails
        )

    def link(self, email: str) -> str:
        return self.stack.manage("login_link", email).strip()

    def sign_in(self, email: str) -> None:
        link = self.link(email)
        self.read(link)
        self.browser.post(link, data={"csrfmiddlewaretoken": self.browser.cookies["csrftoken"]}).raise_for_status()

    def read(self, url: str) -> str:
        """Return the text of a page as the owner sees it, without its line break opportunities."""
        try:
            page = self.browser.get(url)
        except httpx.HTTPError as error:
            raise ExpectationFailed(f"{url} could be read: {error!r}") from error
        if page.status_code != 200:
            raise ExpectationFailed(f"{url} answered 200; it was {page.status_code}")
        return page.text.replace("<wbr>", "")

    def linked_page_contains(self, name: str, words: str) -> bool:
        """Return whether the page linked in the owner's mail about this queue contains these words."""
        for mail in self.mails:
            if name in mail.subject and OWNER in mail.recipients:
                link = re.search(r"http\S+/queues/\S+/", mail.text)
                return link is not None and words in self.read(link.group())
        return False

    def request(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """Send a request to the REST API with the owner's token, and return the answer. Raises ExpectationFailed."""
        try:
            answer = self.api.request(method, f"{self.stack.base_url}/api/{path}", json=body)
        except httpx.HTTPError as error:
            raise ExpectationFailed(f"{method} {path} was answered: {error!r}") from error
        if not answer.is_success:
            raise ExpectationFailed(f"{method} {path} succeeded; it answered {answer.status_code}: {answer.text}")
        return answer.json() if answer.content else {}

    def arguments_of(self, vhost: str, name: str) -> dict[str, Any]:
        """Return a queue's arguments on the broker; empty if it does not exist."""
        with contextlib.suppress(NotOnBroker):
            return dict(self.management.queue(vhost, name)["arguments"])
        return {}


def tell(demo: Demo) -> None:
    urls = prepare(demo)
    start = time.monotonic()
    messages_arrive(demo, urls)
    one_queue_recovers(demo, urls)
    two_queues_are_deleted(demo, urls)
    messages_come_back(demo, urls)
    an_agent_subscribes(demo)
    heading(f"The demo is complete: {len(demo.mails)} mails in {time.monotonic() - start:.0f} s.")


def prepare(demo: Demo) -> dict[str, str]:
    """Start the stack, and create owners, Pulse users and queues. Return the AMQP URL for each queue."""
    heading("Preparing the demo")
    stack = demo.stack
    stack.prepare()
    stack.manage("create_owner", OWNER, "--vouched")
    stack.manage("create_owner", OPERATOR, "--operator")
    stack.start()
    say(f"The web process, the guard, the deleter, a worker and beat are running: {stack.base_url}")
    say(f"Guardian runs a pass every second, warns at {WARN} messages and deletes above {MAX}.")
    token = stack.manage("create_token", OWNER, "--scope", "all").strip()
    demo.api.headers["Authorization"] = f"Token {token}"

    administrator = stack.environment["RABBIT_URL"]
    urls, users = {UNOWNED: administrator}, []
    with channel_at(administrator) as channel:
        channel.queue_declare(UNOWNED, durable=True)
    for name in (CONSUMED, GROWING):
        users.append(user := name.split("/")[1])
        password = demo.request("pulse-users/", {"username": user, "owners": [OWNER]})["password"]
        urls[name] = f"amqp://{user}:{quote(password)}@{administrator.rpartition('@')[2]}"
        with channel_at(urls[name]) as channel:
            channel.exchange_declare(f"exchange/{user}/done", "topic", durable=True)
            channel.queue_declare(name, durable=True)
            channel.queue_bind(name, f"exchange/{user}/done", "#")
    say(f"{OWNER} owns the Pulse users {' and '.join(users)}; {OPERATOR} is the operator.")
    demo.expect("Guardian knows the queues", lambda: len(demo.request("queues/", method="GET")) == 2)
    demo.sign_in(OWNER)
    show_links(demo)
    return urls


def show_links(demo: Demo) -> None:
    say("Follow the demo on Guardian's pages. Each link signs you in once, within ten minutes:")
    for email, who in ((OWNER, "who owns two of the queues"), (OPERATOR, "the operator")):
        say(f"   as {email}, {who}: {demo.link(email)}", "cyan")


def publish_to(demo: Demo, urls: dict[str, str], name: str, numbers: range) -> None:
    """Publish messages to a queue in another thread, through its exchange if it has one."""
    exchange = "" if name == UNOWNED else name.replace("queue/", "exchange/")
    demo.run(publish, urls[name], exchange, name if name == UNOWNED else "linux.opt", numbers)


def messages_arrive(demo: Demo, urls: dict[str, str]) -> None:
    heading("Messages arrive, and no consumer reads them")
    for name in urls:
        publish_to(demo, urls, name, range(WARN + 50))
    for name in (CONSUMED, GROWING):
        demo.expect(f"{OWNER} is warned about {name}", lambda: demo.has_mail("warning", name, OWNER))  # noqa: B023
    demo.expect(
        f"Signed in, {OWNER} follows the mail's link and reads that {GROWING} is over its warning threshold",
        lambda: demo.linked_page_contains(GROWING, "over its warning threshold"),
    )
    demo.expect(
        f"{OPERATOR} gets copies, and is warned about the unowned queue {UNOWNED}",
        lambda: all(demo.has_mail("warning", name, OPERATOR) for name in urls),
    )


def one_queue_recovers(demo: Demo, urls: dict[str, str]) -> None:
    heading(f"A consumer reads {CONSUMED}")
    demo.run(consume, urls[CONSUMED], CONSUMED)
    demo.expect(f"{CONSUMED} is empty", lambda: demo.lengths.get(CONSUMED) == 0)
    demo.expect(f"{OWNER} is notified that it is back to normal", lambda: demo.has_mail("recovery", CONSUMED, OWNER))


def two_queues_are_deleted(demo: Demo, urls: dict[str, str]) -> None:
    heading(f"No consumer reads {GROWING} and {UNOWNED}, and they keep growing")
    for name in (GROWING, UNOWNED):
        publish_to(demo, urls, name, range(WARN + 50, MAX + 150))
    for name in (GROWING, UNOWNED):
        demo.expect(f"{name} is deleted from the broker", lambda: name not in demo.lengths)  # noqa: B023
    demo.expect(f"{OWNER} is notified that {GROWING} was deleted", lambda: demo.has_mail("deletion", GROWING, OWNER))
    demo.expect(
        f"The page of {GROWING} says that Guardian deleted it",
        lambda: demo.linked_page_contains(GROWING, "Guardian deleted this queue"),
    )
    demo.expect(
        f"{OPERATOR} is notified of both deletions",
        lambda: all(demo.has_mail("deletion", name, OPERATOR) for name in (GROWING, UNOWNED)),
    )
    demo.expect(f"{CONSUMED} still exists", lambda: CONSUMED in demo.lengths)
    demo.expect(
        f"Only {OPERATOR} was notified about {UNOWNED}",
        lambda: {to for mail in demo.mails if UNOWNED in mail.subject for to in mail.recipients} == {OPERATOR},
    )


def messages_come_back(demo: Demo, urls: dict[str, str]) -> None:
    """Show how the owner of a deleted queue restores it, and compare its messages with those that were sent."""
    demo.expect("The publishers have sent their last messages, to no queue", lambda: all(demo.finished()))
    heading(f"{OWNER} brings the messages of {GROWING} back")
    say(f"With a token of {OWNER}, the REST API gives the archive of the deleted queue:")
    archive = demo.request(f"archives/?queue={quote(GROWING)}", method="GET")[0]
    count, path = archive["messages"], f"archives/{archive['uuid']}"
    sent = checksum(f"message {number}".encode() for number in range(count))
    say(f"   the publisher's first {count} messages: SHA-256 {sent}", "cyan")
    lines = demo.read(f"{demo.stack.base_url}/api/{path}/download/").splitlines()
    archived = checksum(json.loads(line)["body"].encode() for line in lines)
    say(f"   downloaded from the archive:         SHA-256 {archived}", "cyan")
    demo.expect(f"Guardian archived {count} messages, in their order and unchanged", lambda: archived == sent)
    if archive["dropped"]:
        say(f"{archive['dropped']} more arrived while the queue was deleted, and are lost; the mail says so.")
    say(f"The queue may have {MAX} messages, so {OWNER} restores it in two parts, and reads each.")
    arrived: list[bytes] = []
    for first, last in ((1, count // 2), (count // 2 + 1, count)):
        replay = demo.request(f"{path}/restore/", {"first": first, "last": last})
        progress = f"{path}/replays/{replay['uuid']}/"
        demo.expect(
            f"The queue has the messages {first} to {last} again",
            lambda: demo.request(progress, method="GET")["state"] == "done",  # noqa: B023
        )
        arrived += consume(urls[GROWING], GROWING)
    say(f"   consumed from the queue:             SHA-256 {checksum(arrived)}", "cyan")
    demo.expect(f"All {count} messages are back, in their order and unchanged", lambda: checksum(arrived) == sent)


def an_agent_subscribes(demo: Demo) -> None:
    heading(f"An agent of {OWNER} subscribes to orders for the offering {OFFERING}")
    offering = str(uuid.uuid4())
    demo.stack.manage("create_offering", OFFERING, "--uuid", offering, "--member", OWNER, "--publisher", OWNER)
    say(f"With the token of {OWNER} it registers a queue over the REST API:")
    identity = demo.request("marketplace-site-agent-identities/", {"offering": offering, "name": "demo-agent"})
    register = f"marketplace-site-agent-identities/{identity['uuid']}/register_event_subscription/"
    login = demo.request(register, {"observable_object_type": "order"})["uuid"]
    subscription = f"event-subscriptions/{login}/"
    registered = demo.request(f"{subscription}create_queue/", {"offering_uuid": offering, "object_type": "order"})
    vhost, name = registered["vhost"], registered["queue_name"]
    say(f"   {name}")
    wanted = {"x-max-length", "x-message-ttl", "x-dead-letter-routing-key"}
    demo.expect(
        "It is on the broker, with a length limit, a message TTL and a dead-letter queue",
        lambda: wanted <= demo.arguments_of(vhost, name).keys(),
    )

    assert demo.stack.node is not None
    url = demo.stack.node.stomp_url
    assert url is not None
    say(f"It reads the queue with STOMP over WebSocket at {url}, with its token as password.")
    logging.getLogger("stomp.py").setLevel(logging.WARNING)  # it logs each step of connecting
    token = demo.api.headers["Authorization"].removeprefix("Token ")
    with StompReader(url, vhost=vhost, login=login, passcode=token, queue_name=name) as reader:
        page = f"{demo.stack.base_url}/agents/"
        demo.expect(
            f"Signed in, {OWNER} sees the agent and its queue on {page}",
            lambda: all(text in demo.read(page) for text in ("demo-agent", name)),
        )
        sent = {"order_uuid": uuid.uuid4().hex, "order_state": "done"}
        say(f"A publisher sends an event about an order: {json.dumps(sent)}")
        published = demo.request(f"offerings/{offering}/events/", {"object_type": "order", "payload": sent})
        demo.expect("Guardian published it to one queue", lambda: published["delivered"] == 1)
        demo.expect("The agent received it", lambda: sent.items() <= json.loads(reader.take() or "{}").items())

        say("The agent deletes its subscription.")
        demo.request(subscription, method="DELETE")
        demo.expect("Its queue is deleted from the broker", lambda: not demo.arguments_of(vhost, name))
        demo.expect(
            "Its connection is closed, and its login is deleted",
            lambda: reader.is_closed() and login not in {user.name for user in demo.management.users()},
        )


def stay(demo: Demo) -> None:
    """Print the addresses and directories. On a terminal, keep running and report changes until Ctrl-C."""
    stack = demo.stack
    assert stack.node is not None
    say(f"Guardian:  {stack.base_url}")
    say(f"RabbitMQ:  {stack.node.management_url}")
    say(f"The mails: {VAR / 'mail'}")
    say(f"The logs:  {stack.logs}")
    if os.environ.get("CI", "").lower() in ("1", "true", "yes") or not sys.stdout.isatty():
        say("The demo ends here, because nobody watches it on a terminal. In one, it runs until Ctrl-C.")
        return
    show_links(demo)
    say("Guardian keeps running. Ctrl-C stops it and everything that it started.", "bold")
    while True:
        demo.report_changes()
        time.sleep(0.1)


def main() -> int:
    """Run the demo. Return 1 if something did not start or did not happen, 130 if interrupted."""
    if "MAKELEVEL" in os.environ:  # make forwards no signal
        end_with_parent()
    turn_signals_into_interrupts()
    arrived: queue.SimpleQueue[Mail] = queue.SimpleQueue()
    code = 130
    # The publishers end when the stack has stopped the broker.
    with (
        ThreadPoolExecutor() as threads,
        Stack(isolated(SETTINGS), var=VAR, say=say, on_mail=arrived.put, fresh=True) as stack,
    ):
        demo = Demo(stack, arrived, threads)
        try:
            tell(demo)
            code = 0
            stay(demo)
        except KeyboardInterrupt:
            say("Stopping.")
        except ExpectationFailed as error:
            code = 1
            say(f"✗  This did not happen: {error}", "bold red")
            for name in ("web", "guard", "deleter", "worker", "beat"):
                console.print(f"\nThe end of {name}'s log:\n{escape(tail(stack.logs / f'{name}.log'))}")
        except (StartError, BrokerError, Refused) as error:
            code = 1
            say(f"✗  {error}", "bold red")
    return code


if __name__ == "__main__":
    sys.exit(main())
