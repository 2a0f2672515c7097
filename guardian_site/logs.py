"""Formats of the log, and the access log. Neither contains secrets.

Each record is a line, or with ``LOG_FORMAT=json`` an object. Both contain the id of ``guardian_site.tracing``.
"""

import logging
import time
from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils.encoding import iri_to_uri
from django.utils.functional import SimpleLazyObject
from pythonjsonlogger.json import JsonFormatter

from core.masking import mask_all_secrets, mask_secrets
from core.middleware import Middleware
from guardian_site import tracing
from rabbit.requests.sending import Call

FIELDS = ("method", "path", "status", "outcome", "milliseconds", "owner")
"""Extra fields of a record in JSON. All others are left out: libraries add anything, even whole requests."""

QUIET_PATHS = ("/healthz", "/readyz", "/metrics")
"""Machines request these every few seconds, so they are logged at DEBUG."""

requests = logging.getLogger("guardian.requests")
broker = logging.getLogger("guardian.broker")


# A name of a queue must not be able to forge a log line, or to control the terminal that shows the log.
_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROLS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


class LineFormatter(logging.Formatter):
    """Formats a record as a line, followed by the indented lines of its traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(id)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides logging's method
        request_id = tracing.current()
        record.id = f" [{request_id}]" if request_id else ""
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record)).translate(_CONTROLS).replace("\n", "\n  ")


class JSONLinesFormatter(JsonFormatter):
    """Formats a record as a JSON object on one line."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "process", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"},
            timestamp="time",
            json_default=_as_text,
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        allowed = ("time", "level", "logger", "process", "message", *FIELDS, "exception", "stack")
        request_id = tracing.current()
        masked: dict[str, Any] = {"request_id": request_id} if request_id else {}
        for name in allowed:
            if (value := log_data.get(name)) is not None:
                masked[name] = mask_all_secrets(value)
        return masked


def _as_text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else mask_secrets(str(value))


class AccessLog(Middleware):
    """Middleware: log each request with its path, but without its query. It follows ``tracing.RequestId``."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        began = time.perf_counter()
        response = self.get_response(request)
        fields = {
            "method": request.method,
            # Mask here and not only in the formatter, because Sentry reads the record itself.
            "path": mask_secrets(iri_to_uri(request.path)),
            "status": response.status_code,
            "milliseconds": round((time.perf_counter() - began) * 1000, 1),
            "owner": _owner_uuid(request),
        }
        is_quiet = request.path in QUIET_PATHS or request.path.startswith(settings.STATIC_URL)
        level = logging.DEBUG if is_quiet else logging.INFO
        line = "%(method)s %(path)s: %(status)d in %(milliseconds)g ms, %(owner)s"
        requests.log(level, line, {**fields, "owner": fields["owner"] or "nobody"}, extra=fields)
        return response


def _owner_uuid(request: HttpRequest) -> str | None:
    """Return the signed-in owner's UUID, if the view has loaded the owner. Loading it for the log costs a query."""
    user = getattr(request, "user", None)
    if user is None or (isinstance(user, SimpleLazyObject) and not hasattr(request, "_cached_user")):
        return None
    return user.uuid.hex if user.is_authenticated else None


def log_call(call: Call) -> None:
    """Log a request to the broker at DEBUG. The caller logs its failure too, with the consequences."""
    if broker.isEnabledFor(logging.DEBUG):
        fields = {**call._asdict(), "milliseconds": round(call.seconds * 1000, 1)}
        broker.debug("%(method)s %(path)s: %(outcome)s in %(milliseconds)g ms", fields, extra=fields)
