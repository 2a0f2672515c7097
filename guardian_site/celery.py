"""The Celery application: ``celery -A guardian_site worker`` and ``celery -A guardian_site beat``."""

import logging
import os
from typing import Any

from celery import Celery, signals
from django.conf import settings
from django.utils.log import configure_logging

from guardian_site import tracing  # noqa: F401 - its signal handlers pass the id to tasks

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")

logger = logging.getLogger(__name__)

app = Celery("guardian")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@signals.setup_logging.connect
def configure_logging_from_settings(**_: Any) -> None:
    """Use Django's LOGGING in workers and beat. Celery's own handlers would log each line twice."""
    configure_logging(settings.LOGGING_CONFIG, settings.LOGGING)


@signals.worker_init.connect
@signals.beat_init.connect
def refuse_wrong_settings(**_: Any) -> None:
    """Stop a worker or beat if the system checks find errors in the settings."""
    from django.core.checks import run_checks

    found = [message for message in run_checks() if not message.is_silenced()]
    for message in found:
        logger.log(message.level, "%s: %s %s", message.id, message.msg, message.hint or "")
    if any(message.is_serious() for message in found):
        raise SystemExit("The settings have errors. Correct them; the log has the details.")
