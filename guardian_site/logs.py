"""What the log says and in which form, and what is kept out of it.

A line, or with ``LOG_FORMAT=json`` an object, for each record. Both have the id of ``guardian_site.tracing``.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils.encoding import iri_to_uri
from django.utils.functional import SimpleLazyObject
from pythonjsonlogger.json import JsonFormatter

from core.masking import mask_all_secrets, mask_secrets
from guardian_site import tracing
from rabbit.management import Call

FORMATS = ("line", "json")

FIELDS = ("method", "path", "status", "outcome", "milliseconds", "owner")
"""What a record may have beside its message, in JSON. What libraries add may be anything, whole requests included."""

QUIET_PATHS = ("/healthz", "/readyz", "/metrics")
"""Machines ask for these every few seconds."""

requests = logging.getLogger("guardian.requests")
broker = logging.getLogger("guardian.broker")


# Whoever may name a queue must not be able to write a line of the log, or to speak to the terminal that shows it.
_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROLS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


class LineFormatter(logging.Formatter):
    """A line for each record; a traceback follows in lines of its own, which begin with spaces."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(id)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in logging
        """Return the line itself."""
        request_id = tracing.current()
        record.id = f" [{request_id}]" if request_id else ""
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and the traceback, without secrets."""
        return mask_secrets(super().format(record)).translate(_CONTROLS).replace("\n", "\n  ")


class JSONLinesFormatter(JsonFormatter):
    """An object for each record, on one line."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "process", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"},
            timestamp="time",
            json_default=_as_text,
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Return what is written of a record: what is known here, without secrets, and the id."""
        known = ("time", "level", "logger", "process", "message", *FIELDS, "exception", "stack")
        request_id = tracing.current()
        written: dict[str, Any] = {"request_id": request_id} if request_id else {}
        for name in known:
            if (value := log_data.get(name)) is not None:
                written[name] = mask_all_secrets(value)
        return written


def _as_text(value: Any) -> str:
    """Return what JSON has no form for."""
    return value.isoformat() if isinstance(value, datetime) else mask_secrets(str(value))


class AccessLog:
    """Middleware: a line for each request, with its path and without its query. It stands right behind the id's."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass on, and log."""
        began = time.perf_counter()
        response = self.get_response(request)
        fields = {
            "method": request.method,
            # Here already, for those who take records before they are written, as Sentry does.
            "path": mask_secrets(iri_to_uri(request.path)),
            "status": response.status_code,
            "milliseconds": round((time.perf_counter() - began) * 1000, 1),
            "owner": _who(request),
        }
        is_quiet = request.path in QUIET_PATHS or request.path.startswith(settings.STATIC_URL)
        level = logging.DEBUG if is_quiet else logging.INFO
        line = "%(method)s %(path)s: %(status)d in %(milliseconds)g ms, %(owner)s"
        requests.log(level, line, {**fields, "owner": fields["owner"] or "nobody"}, extra=fields)
        return response


def _who(request: HttpRequest) -> str | None:
    """Return the UUID of whoever asked, where the view wanted to know; to find out for the log alone costs a query."""
    user = getattr(request, "user", None)
    if user is None or (isinstance(user, SimpleLazyObject) and not hasattr(request, "_cached_user")):
        return None
    return user.uuid.hex if user.is_authenticated else None


def log_call(call: Call) -> None:
    """Log a call to the broker. What failed is told by whoever made it, too, with what follows from it."""
    if broker.isEnabledFor(logging.DEBUG):
        fields = {**call._asdict(), "milliseconds": round(call.seconds * 1000, 1)}
        broker.debug("%(method)s %(path)s: %(outcome)s in %(milliseconds)g ms", fields, extra=fields)
