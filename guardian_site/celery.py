"""The Celery application: ``celery -A guardian_site worker`` and ``celery -A guardian_site beat``."""

import os
from typing import Any

from celery import Celery, signals

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")

app = Celery("guardian")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@signals.worker_init.connect
@signals.beat_init.connect
def refuse_wrong_settings(**_: Any) -> None:
    """End a worker or beat before it does anything by settings that the system checks refuse."""
    from django.core.management import CommandError, call_command

    try:
        call_command("check", fail_level="ERROR")
    except CommandError as error:
        raise SystemExit(str(error)) from None
