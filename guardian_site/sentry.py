"""Reports errors of views, tasks and commands to Sentry, if ``SENTRY_DSN`` is set.

A separate thread sends the events, so a slow or unavailable Sentry delays nothing. Unsent events are dropped.
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
"""The timeout for sending the remaining events when a process ends."""

NEVER_SENT = ("data", "cookies", "query_string")
"""Parts of a request that are removed from events."""


def is_dsn(text: str) -> bool:
    """Return whether a text is the address of a Sentry project."""
    try:
        Dsn(text)
    except ValueError:  # Sentry's BadDsn, or urllib's error for an invalid port
        return False
    return True


def start(dsn: str) -> None:
    """Start reporting errors. Ignore an invalid DSN: the system checks refuse it."""
    if not is_dsn(dsn):
        return
    sentry_sdk.init(
        dsn=dsn,
        before_send=clean,
        send_default_pii=False,
        max_request_body_size="never",
        include_local_variables=False,
        shutdown_timeout=SHUTDOWN_SECONDS,
        # Send errors only.
        auto_session_tracking=False,
        send_client_reports=False,
        enable_metrics=False,
        enable_backpressure_handling=False,
        # Other integrations would send commands' arguments, and add headers to requests to webhooks.
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
    """Return an event with the request id and without secrets."""
    request: Any = event.get("request", {})
    for name in NEVER_SENT:
        request.pop(name, None)
    cleaned: Event = mask_all_secrets(event)
    if request_id := tracing.current():
        cleaned["tags"] = {**cleaned.get("tags", {}), "request_id": request_id}
    return cleaned
