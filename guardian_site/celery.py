"""The Celery application: ``celery -A guardian_site worker`` and ``celery -A guardian_site beat``."""

import logging
import os
from typing import Any

from celery import Celery, signals
from django.conf import settings
from django.utils.log import configure_logging

from guardian_site import tracing  # noqa: F401 - carries the id into the tasks

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")

logger = logging.getLogger(__name__)

app = Celery("guardian")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@signals.setup_logging.connect
def log_as_everywhere(**_: Any) -> None:
    """Leave logging to the settings, in workers and beat too; Celery's own handlers would say everything twice."""
    configure_logging(settings.LOGGING_CONFIG, settings.LOGGING)


@signals.worker_init.connect
@signals.beat_init.connect
def refuse_wrong_settings(**_: Any) -> None:
    """End a worker or beat before it does anything by settings that the system checks refuse."""
    from django.core.checks import run_checks

    found = [message for message in run_checks() if not message.is_silenced()]
    for message in found:
        logger.log(message.level, "%s: %s %s", message.id, message.msg, message.hint or "")
    if any(message.is_serious() for message in found):
        raise SystemExit("The settings can't be used.")
