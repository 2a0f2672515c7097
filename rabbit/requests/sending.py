"""Send a request to the management API, and turn the answer's status into an error."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import quote, unquote, urlencode

import orjson

from rabbit.errors import (
    MAX_REASON_LENGTH,
    BrokerUnavailable,
    InequivalentArguments,
    MalformedResponse,
    NotOnBroker,
    Refused,
)
from rabbit.failover import FailoverClient
from rabbit.http import Answer, NoAnswer, TooLarge

JSONObject = dict[str, Any]

BODY_READ_TIMEOUTS = 3
"""The timeout of a whole answer, in read timeouts."""

MAX_TARGET_BYTES = 65_536
"""The broker closes the connection during a longer request line."""

_PATH_TEMPLATES = {
    "bindings": ("bindings", "{vhost}"),
    "connections": ("connections", "username", "{user}"),
    "consumers": ("consumers", "{vhost}"),
    "exchanges": ("exchanges", "{vhost}", "{name}"),
    "operator-policies": ("operator-policies", "{vhost}"),
    "permissions": ("permissions", "{vhost}", "{user}"),
    "policies": ("policies", "{vhost}"),
    "queues": ("queues", "{vhost}", "{name}"),
    "users": ("users", "{name}"),
    "vhosts": ("vhosts", "{name}"),
}
"""The segments of a path that are names, by its first segment. Segments after these are literal."""


class Call(NamedTuple):
    """A finished request. ``path`` has placeholders for names and no query: ``/api/queues/{vhost}/{name}``.

    ``outcome``: ``ok``; ``refused``: a 4xx; ``failed``: a 5xx, or an answer that is not the management API's;
    ``away``: no answer. ``seconds`` includes the retry, if there was one.
    """

    method: str
    path: str
    outcome: Literal["ok", "refused", "failed", "away"]
    seconds: float


class Requests:
    """Send requests to the management API, for many threads.

    - ``url``: ``http://user:password@host:15672``, user and password percent-encoded, with a reverse proxy's path; or
      several, separated by commas, of nodes of one cluster, which are tried in turn.
    - ``read_timeout``: seconds. It limits each read, and ``BODY_READ_TIMEOUTS`` times that a whole answer.
    - ``on_call``: called with each finished request, in the thread that made it.
    - ``request_id``: returns the ``X-Request-ID`` header; empty: none is sent.

    Every method may raise BrokerUnavailable, Refused or MalformedResponse; and NotOnBroker if what it is about, or its
    vhost, does not exist, or a queue's node is down. Docstrings name further errors. A request whose connection dies is
    retried once on a new one: all requests are idempotent, and RabbitMQ 4 drops idle connections without notice.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        read_timeout: float = 20.0,
        on_call: Callable[[Call], None] = lambda call: None,
        request_id: Callable[[], str] = str,
    ) -> None:
        self._on_call = on_call
        self._request_id = request_id
        self._http = FailoverClient(url, _URL_FORM, read_timeout, BODY_READ_TIMEOUTS * read_timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._http.where}>"

    def close(self) -> None:
        self._http.close()

    def in_turn(self) -> Iterator[Self]:
        """Return a client of each address alone, for work that must not change the node halfway.

        Ask for the next one only if the work failed: then all clients of this process begin with another address.
        """
        return map(self._through, self._http.in_turn())

    @property
    def has_several_addresses(self) -> bool:
        return len(self._http) > 1

    def cluster_ids(self) -> dict[str, str]:
        """Return the id of the cluster at each address; empty: there is no answer."""
        return self._http.cluster_ids()

    def _through(self, http: FailoverClient) -> Self:
        one = copy(self)
        one._http = http
        return one

    def _get(self, *path: str, params: Mapping[str, str] | None = None) -> Answer:
        return self._confirmed(self._exchange("GET", path, params=params))

    def _put(self, *path: str, json: Mapping[str, Any] | None = None) -> bool:
        answer = self._confirmed(self._exchange("PUT", path, json=json or {}))
        require_written(answer)
        return answer.status == 201

    def _delete(self, *path: str, headers: Mapping[str, str] | None = None) -> None:
        answer = self._exchange("DELETE", path, headers=headers)
        try:
            require_written(self._confirmed(answer))
        except NotOnBroker:
            if not answer.sent_twice:
                raise

    def _confirmed(self, answer: Answer) -> Answer:
        """Return a 2xx answer, or raise the error for its status.

        While RabbitMQ shuts down, it answers every request with its own 404. So a 404 counts only if ``whoami``, which
        always exists, still answers right after it at the same address.

        RabbitMQ 4 answers with an empty 500 instead of a 400 or 404 if the reason contains a character outside ASCII.
        Reasons contain the names in the request.
        """
        is_write = not answer.request.startswith("GET ")
        if answer.status == 500 and not answer.body and is_write and not unquote(answer.request).isascii():
            self._require_running(answer)
            raise Refused(
                f"{answer.request}: refused with 500 and without a reason, because its name is not ASCII; see the "
                "broker's log for the reason",
                status=500,
                reason="the broker gave no reason, because the name is not ASCII; see its log",
            )
        try:
            return checked(answer)
        except NotOnBroker:
            self._require_running(answer)
            raise
        except BrokerUnavailable:
            self._http.move_past(answer.address)
            raise

    def _require_running(self, answer: Answer) -> None:
        try:
            checked(self._through(self._http.at(answer.address))._exchange("GET", ("whoami",)))
        except (NotOnBroker, BrokerUnavailable) as reason:
            self._http.move_past(answer.address)
            raise BrokerUnavailable(
                f"{answer.request}: the broker answers every request with 404 or not at all ({reason}), so it is "
                f"shutting down; retry later, and {CHECK_URL}"
            ) from reason

    def _exchange(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        ok_status: int | None = None,
    ) -> Answer:
        """Send a request, report it to ``on_call``, and return the answer of any status.

        An answer with ``ok_status`` counts as ``ok``.
        """
        url_path = build_path(method, path)
        headers = dict(headers or {})
        if request_id := self._request_id():
            headers["X-Request-ID"] = request_id
        outcome: Literal["ok", "refused", "failed", "away"] = "away"
        began = time.perf_counter()
        try:
            answer = self._send(method, url_path, params, json, headers)
            if answer.status < 300 or answer.status == ok_status:
                outcome = "ok"
            else:
                outcome = "refused" if 400 <= answer.status < 500 else "failed"
            return answer
        except Refused:
            outcome = "refused"
            raise
        except MalformedResponse:
            outcome = "failed"
            raise
        finally:
            self._on_call(Call(method, _path_template(path), outcome, time.perf_counter() - began))

    def _send(
        self,
        method: str,
        url_path: str,
        params: Mapping[str, str] | None,
        json: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> Answer:
        request = f"{method} {url_path}"
        query = f"?{urlencode(params)}" if params else ""
        target = f"{url_path}{query}"
        if len(target) > MAX_TARGET_BYTES:
            raise Refused(
                f"{request[:MAX_REASON_LENGTH]}: not sent, because the URL is too long; use a shorter name",
                status=0,
                reason="the name is too long",
            )
        body = None
        if json is not None:
            body = orjson.dumps(json)
            headers = {**headers, "Content-Type": "application/json"}
        try:
            answer = self._http.send(method, target, body, headers)
        except NoAnswer as error:
            if error.is_another_cluster:
                remedy = "write only addresses of nodes of the guarded cluster"
            elif error.timed_out:
                remedy = "the broker is busy, or a queue's process doesn't respond; retry later"
            elif error.never_reached:
                remedy = "check that RabbitMQ runs there with its management plugin"
            else:
                remedy = "retry later, and check that the URL has the management API's port"
            raise BrokerUnavailable(
                f"{request}: {error}; {remedy}", timed_out=error.timed_out, never_reached=error.never_reached
            ) from error
        except TooLarge as error:
            raise MalformedResponse(f"{request}: {error}; request a smaller list") from error
        if answer.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise MalformedResponse(f"{request}: the answer is compressed, and is not unpacked here; {CHECK_URL}")
        return answer._replace(request=request)


CHECK_URL = "check that the URL leads to RabbitMQ's management API"


_URL_FORM = "write http://user:password@host:15672, with the user and the password percent-encoded"


def build_path(method: str, segments: tuple[str, ...]) -> str:
    """Return the URL's path of these segments."""
    path = "/api/" + "/".join(quote(segment, safe="", errors="replace") for segment in segments)
    for segment in segments:
        if segment in ("", ".", ".."):
            # The broker decodes a path before it resolves dots, so it reads /api/queues/a/%2E%2E as /api/queues.
            raise Refused(
                f"{method} {path}: not sent, because a URL of the management API can't contain the name '{segment}'; "
                "use AMQP or rabbitmqctl",
                status=0,
                reason=f"the name '{segment}' can't be part of a URL",
            )
    return path


def _path_template(path: tuple[str, ...]) -> str:
    template = _PATH_TEMPLATES.get(path[0], ())
    return "/api/" + "/".join(template[: len(path)] + path[len(template) :])


def checked(answer: Answer) -> Answer:
    """Return a 2xx answer, or raise the error for its status."""
    request, status = answer.request, answer.status
    if 200 <= status < 300:
        return answer
    if status < 400:
        to = re.sub(r"//[^/@]*@", "//", answer.headers.get("location", ""))[:MAX_REASON_LENGTH]
        raise MalformedResponse(
            f"{request}: answered with a redirect ({status}) to '{to}', which Guardian doesn't follow; {CHECK_URL}"
        )
    error = _error_in(answer.body)
    reason = _reason(error) if error else f"HTTP {status}"
    if status >= 500:
        raise BrokerUnavailable(
            f"{request}: answered {status} ({reason}); retry later, and see the broker's log", status=status
        )
    if status == 404 or reason == "vhost_or_user_not_found":
        if error is None:
            # A 404 of a proxy or another server must not mean "the queue is gone".
            raise MalformedResponse(f"{request}: answered with a 404 that isn't RabbitMQ's; {CHECK_URL}")
        raise NotOnBroker(f"{request}: not found ({reason}); check the name and the vhost, and that its node runs")
    if status in (401, 403):
        raise Refused(
            f"{request}: refused with {status} ({reason}); check the user's password, tags and permissions",
            status=status,
            reason=reason,
        )
    if status == 400 and "inequivalent arg" in reason:
        raise InequivalentArguments(
            f"{request}: it exists with other arguments ({reason}); delete it first, or declare it as it is",
            status=status,
            reason=reason,
        )
    raise Refused(f"{request}: refused with {status} ({reason}); change the request", status=status, reason=reason)


def _error_in(body: bytes) -> JSONObject | None:
    """Return the broker's error object; None if the body has none."""
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return error if isinstance(error, dict) and "error" in error else None


def _reason(error: JSONObject) -> str:
    reason = error.get("reason") or error.get("error")
    text = reason if isinstance(reason, str) else orjson.dumps(reason).decode()
    return text.strip()[:MAX_REASON_LENGTH]


def require_written(answer: Answer) -> None:
    """Raise MalformedResponse unless the answer is that of a write."""
    if answer.status not in (201, 204):
        raise MalformedResponse(f"{answer.request}: answered {answer.status} instead of 201 or 204; {CHECK_URL}")
