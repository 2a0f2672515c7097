"""The Celery application: ``celery -A guardian_site worker`` and ``celery -A guardian_site beat``."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")

app = Celery("guardian")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
