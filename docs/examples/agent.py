"""An agent: registers with Guardian, and handles the events of an offering until it is stopped.

The environment has its settings:

    GUARDIAN  the address of Guardian, https://guardian.example.org
    BROKER    the address of RabbitMQ's STOMP over WebSocket, wss://rabbit.example.org/ws
    OFFERING  the UUID of the offering
    TOKEN     a token that can register queues

SIGTERM and SIGINT stop it after the current event. It exits with the status 2 if trying again is useless: a setting,
the token or the offering has to be changed first. It needs httpx, stomp.py and websocket-client.
"""

import json
import logging
import os
import queue
import random
import signal
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import stomp
import websocket

NAME = "my-agent"
VERSION = "1.0"
TYPES = ["order", "resource"]  # of the events to receive; an empty list: all

TIMEOUT_SECONDS = 30
FIRST_WAIT_SECONDS = 1
MAX_WAIT_SECONDS = 60
HEARTBEAT_MILLISECONDS = 10_000
PREFETCH = 10
REMEMBERED_MESSAGES = 10_000
RETRIED_STATUSES = {404, 408, 409, 429}  # and all from 500 on

logger = logging.getLogger(NAME)


def handle(event: dict[str, Any]) -> None:
    """Handle an event. If this raises an exception, the event is moved to the dead-letter queue."""
    logger.info("event %s %s", event["object_type"], json.dumps(event))


class TryAgain(Exception):
    """Something failed that may work later, after at least ``seconds``."""

    def __init__(self, text: str, seconds: float = 0) -> None:
        super().__init__(text)
        self.seconds = seconds


class Useless(Exception):
    """Something failed that does not work until a person changes a setting, the token or the offering."""


class Stop:
    """Whether a signal has asked the agent to stop."""

    requested = False

    def request(self, *_: Any) -> None:
        """Stop after the current event."""
        self.requested = True

    def wait(self, seconds: float) -> None:
        """Wait, unless the agent is to stop."""
        until = time.monotonic() + seconds
        while not self.requested and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1))


# Settings


class Settings(NamedTuple):
    """The settings of the agent."""

    guardian: str
    broker: str
    offering: str
    token: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the broker."""
        url = urlsplit(self.broker)
        return str(url.hostname), url.port or (443 if url.scheme == "wss" else 80)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings in the environment."""
    values = {name: environment.get(name, "").strip() for name in ("GUARDIAN", "BROKER", "OFFERING", "TOKEN")}
    for name, value in values.items():
        if not value:
            raise Useless(f"{name} is not set")
    for name, schemes in (("GUARDIAN", ("http", "https")), ("BROKER", ("ws", "wss"))):
        try:
            url = urlsplit(values[name])
            is_valid = url.scheme in schemes and url.hostname and url.port != 0
        except ValueError:  # the port is no number
            is_valid = False
        if not is_valid:
            raise Useless(f"{name} must be an address that begins with {' or '.join(f'{one}://' for one in schemes)}")
    try:
        offering = uuid.UUID(values["OFFERING"]).hex
    except ValueError as error:
        raise Useless("OFFERING must be a UUID, with or without dashes") from error
    return Settings(values["GUARDIAN"].rstrip("/"), values["BROKER"], offering, values["TOKEN"])


# Registration


def register(rest: httpx.Client, offering: str) -> dict[str, Any]:
    """Create the agent's identity and its queue if they don't exist, and return the queue."""
    try:
        known = _answer(rest.get("agent-identities/", params={"name": NAME, "offering_uuid": offering}))
        if known:
            identity = known[0]
        else:
            fields = {"name": NAME, "offering": offering, "version": VERSION}
            identity = _answer(rest.post("agent-identities/", json=fields))
        path = f"agent-identities/{identity['uuid']}/register_queue/"
        registered: dict[str, Any] = _answer(rest.post(path, json={"object_types": TYPES}))
    except httpx.HTTPError as error:
        raise TryAgain(f"Guardian is not reachable: {error}") from error
    return registered


def _answer(response: httpx.Response) -> Any:
    """Return the JSON of a response, or raise an exception with Guardian's reason."""
    if response.is_success:
        try:
            return response.json()
        except ValueError as error:
            raise TryAgain(f"{response.url} answered no JSON; is GUARDIAN the address of Guardian?") from error
    text = f"{response.request.method} {response.url}: {response.status_code} {_reason(response)}"
    if response.status_code in RETRIED_STATUSES or response.is_server_error:
        seconds = response.headers.get("Retry-After", "")
        raise TryAgain(text, int(seconds) if seconds.isdecimal() else 0)
    raise Useless(text)


def _reason(response: httpx.Response) -> str:
    """Return why Guardian refused a request: its detail, or the fields with their errors."""
    try:
        body = response.json()
    except ValueError:  # from a proxy
        return response.reason_phrase
    if not isinstance(body, dict):
        return json.dumps(body)
    if "detail" in body:
        return str(body["detail"])
    return "; ".join(f"{field}: {' '.join(map(str, errors))}" for field, errors in body.items())


# Events


class Frames(stomp.ConnectionListener):  # type: ignore[misc]  # the library has no types
    """Passes frames from the threads of stomp.py on to the main thread, which may take its time."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def on_connected(self, frame: Any) -> None:
        """Pass on that the login succeeded."""
        self.received.put(("connected", frame))

    def on_receipt(self, frame: Any) -> None:
        """Pass on that the subscription exists."""
        self.received.put(("receipt", frame))

    def on_message(self, frame: Any) -> None:
        """Pass on a message."""
        self.received.put(("message", frame))

    def on_error(self, frame: Any) -> None:
        """Pass on an error. If the queue was deleted, the connection stays open after it, without a subscription."""
        self.received.put(("error", frame))

    def on_disconnected(self) -> None:
        """Pass on that the connection is closed. A missing heartbeat closes it, too."""
        self.received.put(("disconnected", None))


class Reader:
    """Reads the agent's queue, and handles each event once."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self.settings = settings
        self.stop = stop
        # These are lost when the agent ends. If handling an event twice does harm, store the ids with your own data.
        self.handled: OrderedDict[str, None] = OrderedDict()

    def read(self, registered: Mapping[str, Any]) -> None:
        """Handle events until the agent is stopped, or raise ``TryAgain``."""
        frames = Frames()
        connection = stomp.WSStompConnection(
            [self.settings.address],
            ws_path=urlsplit(self.settings.broker).path or "/ws",
            vhost=registered["vhost"],
            heartbeats=(HEARTBEAT_MILLISECONDS, HEARTBEAT_MILLISECONDS),
            reconnect_attempts_max=1,
            timeout=TIMEOUT_SECONDS,
        )
        if self.settings.broker.startswith("wss:"):
            connection.set_ssl(for_hosts=[self.settings.address])
        connection.set_listener("frames", frames)
        try:
            # Not wait=True, which waits without a limit.
            connection.connect(registered["rmq_username"], self.settings.token)
            self._read(connection, frames, registered["queue_name"])
        except (stomp.exception.StompException, websocket.WebSocketException, OSError) as error:
            text = str(error) or type(error).__name__
            raise TryAgain(f"RabbitMQ is not reachable at {self.settings.broker}: {text}") from error
        finally:
            connection.transport.disconnect_socket()

    def _read(self, connection: Any, frames: Frames, queue_name: str) -> None:
        is_subscribed, deadline = False, time.monotonic() + TIMEOUT_SECONDS
        while not self.stop.requested:
            try:
                kind, frame = frames.received.get(timeout=1)
            except queue.Empty:
                if not is_subscribed and time.monotonic() > deadline:
                    raise TryAgain("RabbitMQ does not answer") from None
                continue
            if kind == "connected":
                headers = {"receipt": "subscribed", "prefetch-count": str(PREFETCH)}
                # Not /queue/…, which would declare the queue with other arguments.
                connection.subscribe(f"/amq/queue/{queue_name}", id="events", ack="client-individual", headers=headers)
            elif kind == "receipt":
                is_subscribed = True
                logger.info("reading %s", queue_name)
            elif kind == "message":
                self._take(connection, frame)
            elif kind == "error":
                raise TryAgain(f"RabbitMQ: {frame.headers.get('message', '')} {frame.body}".strip())
            else:
                raise TryAgain("RabbitMQ closed the connection")

    def _take(self, connection: Any, frame: Any) -> None:
        """Handle a message, unless it is a duplicate or of an unknown type, and acknowledge it."""
        ack, message_id = frame.headers["ack"], frame.headers.get("amqp-message-id")
        event = _event(frame.body)
        if event is None or message_id in self.handled:
            connection.ack(ack)
            return
        try:
            handle(event)
        except Exception:
            logger.exception("The event %s failed; it is moved to the dead-letter queue", message_id)
            connection.nack(ack, requeue="false")
            return
        # Before the ack, which fails if the connection was closed meanwhile. The message comes again then.
        if message_id is not None:
            self.handled[message_id] = None
        if len(self.handled) > REMEMBERED_MESSAGES:
            self.handled.popitem(last=False)
        connection.ack(ack)


def _event(body: str) -> dict[str, Any] | None:
    """Return the event in a message, or None if it is none, or of a type that this agent does not know."""
    try:
        event = json.loads(body)
        object_type = event["object_type"]
    except (ValueError, TypeError, KeyError):
        logger.warning("dropped a message that is no event")
        return None
    return event if not TYPES or object_type in TYPES else None


def run(settings: Settings, stop: Stop) -> None:
    """Register and read until the agent is stopped. After each failure, wait longer, and register again."""
    headers = {"Authorization": f"Token {settings.token}"}
    reader, failures = Reader(settings, stop), 0
    with httpx.Client(base_url=f"{settings.guardian}/api/", headers=headers, timeout=TIMEOUT_SECONDS) as rest:
        while not stop.requested:
            began = time.monotonic()
            try:
                reader.read(register(rest, settings.offering))
            except TryAgain as failure:
                if time.monotonic() - began > MAX_WAIT_SECONDS:
                    failures = 0  # it worked for a while
                wait = min(FIRST_WAIT_SECONDS * 2**failures, MAX_WAIT_SECONDS) * random.uniform(0.5, 1)  # noqa: S311
                failures = min(failures + 1, 10)
                seconds = max(wait, failure.seconds)
                logger.warning("%s; trying again in %.1f s", failure, seconds)
                stop.wait(seconds)


def main() -> int:
    """Run the agent, and return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for library in ("httpx", "stomp.py"):
        logging.getLogger(library).setLevel(logging.ERROR)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.request)
    try:
        run(read_settings(os.environ), stop)
    except Useless as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
