"""Errors of views, tasks and commands, reported to Sentry where ``SENTRY_DSN`` names one.

They are sent by a thread of their own: a Sentry that is away or slow keeps nobody waiting, and what it didn't get is
dropped.
"""

from typing import Any

import sentry_sdk
from sentry_sdk.integrations.atexit import AtexitIntegration
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.integrations.excepthook import ExcepthookIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.types import Event, Hint
from sentry_sdk.utils import Dsn

from core.masking import mask_all_secrets
from guardian_site import tracing

SHUTDOWN_SECONDS = 2
"""How long a process that ends may wait for what is still to be sent."""

NEVER_SENT = ("data", "cookies", "query_string")
"""What of a request is left out."""


def is_dsn(text: str) -> bool:
    """Return whether this is the address of a project of Sentry's."""
    try:
        Dsn(text)
    except ValueError:  # its own BadDsn is one, and so is what urllib says of a port
        return False
    return True


def start(dsn: str) -> None:
    """Report errors from now on. An address that is none is left to the system checks, which refuse it."""
    if not is_dsn(dsn):
        return
    sentry_sdk.init(
        dsn=dsn,
        before_send=clean,
        send_default_pii=False,
        max_request_body_size="never",
        include_local_variables=False,
        shutdown_timeout=SHUTDOWN_SECONDS,
        # Errors are all that is sent.
        auto_session_tracking=False,
        send_client_reports=False,
        enable_metrics=False,
        enable_backpressure_handling=False,
        # No others: they would send what commands were called with, and mark the requests to webhooks.
        default_integrations=False,
        auto_enabling_integrations=False,
        trace_propagation_targets=[],
        integrations=[
            AtexitIntegration(callback=lambda pending, seconds: None),
            CeleryIntegration(propagate_traces=False),
            DedupeIntegration(),
            DjangoIntegration(middleware_spans=False, signals_spans=False, cache_spans=False),
            ExcepthookIntegration(),
            LoggingIntegration(),
        ],
    )


def clean(event: Event, hint: Hint) -> Event:
    """Return an event with the id of what was being done, and without secrets."""
    request: Any = event.get("request", {})
    for name in NEVER_SENT:
        request.pop(name, None)
    cleaned: Event = mask_all_secrets(event)
    if request_id := tracing.current():
        cleaned["tags"] = {**cleaned.get("tags", {}), "request_id": request_id}
    return cleaned
