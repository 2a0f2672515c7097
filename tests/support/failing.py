"""Guardian with a failing view and task that have secrets in variables and messages. Run by gunicorn and Celery."""

import os

from celery import shared_task
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from guardian_site.wsgi import application

__all__ = ["application"]


def address() -> str:
    return "amqp://guardian:" + os.environ["PLANTED_SECRET"] + "@rabbit.example.org:5672/"


@shared_task
def fail_later(given: str) -> None:
    raise ConnectionError(f"The task can't reach {address()}")


@csrf_exempt
def fail(request: HttpRequest) -> HttpResponse:
    in_a_variable = address()
    fail_later.delay(given=in_a_variable)
    raise RuntimeError(f"The view can't reach {in_a_variable}")


from guardian_site import urls  # noqa: E402 - after Django is set up

urls.urlpatterns.insert(0, path("fail/", fail))
