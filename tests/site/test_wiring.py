"""Receivers, tasks, URLs, commands, checks and columns: one lost in a move would cause no error."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ReferenceType

import celery.signals
import django.contrib.auth.signals
import django.core.signals
import django.db.models.signals
from auditlog.registry import auditlog
from celery.utils.dispatch import Signal as CelerySignal
from django.apps import apps
from django.conf import settings
from django.core.checks.registry import registry
from django.core.management import get_commands
from django.dispatch import Signal
from django.urls import URLPattern, URLResolver, get_resolver

import accounts.signals
from accounts.pulse_users import queue_counts
from core import broker
from guardian_site.celery import app
from notifications import kinds, subjects
from queues.guard import pruning, registered
from tests.support.plugin import ROOT

RECORDED = Path(__file__).with_name("wiring.json")
SIGNALS_OF = [
    django.core.signals,
    django.db.models.signals,
    django.contrib.auth.signals,
    celery.signals,
    accounts.signals,
]
OUR_APPS = [config.label for config in apps.get_app_configs() if "site-packages" not in config.path]


def name_of(function: Any) -> str:
    """Return the name of a function or class without its module."""
    function = getattr(function, "view_class", None) or getattr(function, "cls", None) or function
    return str(getattr(function, "__qualname__", type(function).__name__))


def is_ours(function: Any) -> bool:
    return getattr(function, "__module__", type(function).__module__).split(".")[0] in {
        path.parent.name for path in Path(settings.BASE_DIR).glob("*/__init__.py") if path.parent.name != "tests"
    }


def receivers() -> Iterator[str]:
    """Yield "signal from sender: receiver" for all receivers of Guardian."""
    for module in SIGNALS_OF:
        for signal_name, signal in vars(module).items():
            if isinstance(signal, (Signal, CelerySignal)):
                for (_, sender), receiver, *_ in signal.receivers or []:
                    function = receiver() if isinstance(receiver, ReferenceType) else receiver
                    if function is not None and is_ours(function):
                        yield f"{signal_name} from {sender_name(sender)}: {name_of(function)}"


def sender_name(sender: int) -> str:
    for model in apps.get_models(include_auto_created=True):
        if id(model) == sender:
            return model.__name__
    return "anything"


def urls(patterns: list[Any], prefix: str = "") -> Iterator[str]:
    """Yield "path: view (name)" for all URLs."""
    for pattern in patterns:
        path = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from urls(pattern.url_patterns, path)
        elif isinstance(pattern, URLPattern):
            yield f"{path}: {name_of(pattern.callback)} ({pattern.name})"


def after_setup() -> dict[str, Any]:
    """Return what is connected after ``django.setup()`` alone."""
    return {
        "receivers": sorted(receivers()),
        "checks": sorted(name_of(check) for check in registry.registered_checks if is_ours(check)),
        "kinds of notification": sorted(kinds.names()),
        "subjects": sorted(subjects._lookups),
        "registered queues": [type(provider).__name__ for provider in registered._providers],
        "numbers of queues": [name_of(count) for count in queue_counts._counts],
        "also pruned": [name_of(old) for old in pruning.also_pruned],
        "called for each request to the broker": sorted(map(name_of, broker.listeners)),
        "id of a request to the broker": name_of(broker.request_id),
    }


def wiring() -> dict[str, Any]:
    """Return what is connected, without module names."""
    found = after_setup()
    app.loader.import_default_modules()
    models = [model for model in apps.get_models(include_auto_created=True) if model._meta.app_label in OUR_APPS]
    return found | {
        "tasks": sorted(name.rpartition(".")[2] for name, task in app.tasks.items() if is_ours(task)),
        "beat": {
            key: [entry["task"].rpartition(".")[2], entry["schedule"], entry.get("options")]
            for key, entry in sorted(app.conf.beat_schedule.items())
        },
        "routes": {name.rpartition(".")[2]: route for name, route in sorted(app.conf.task_routes.items())},
        "urls": sorted(set(urls(get_resolver().url_patterns))),
        "commands": sorted(name for name, package in get_commands().items() if package in OUR_APPS),
        "audited": {
            model.__name__: [sorted(fields["include_fields"]), sorted(fields["m2m_fields"])]
            for model in sorted(auditlog.get_models(), key=lambda model: model.__name__)
            for fields in [auditlog.get_model_fields(model) | {"m2m_fields": auditlog._registry[model]["m2m_fields"]}]
        },
        "columns": {
            model.__name__: sorted(f"{field.column}: {field.get_internal_type()}" for field in model._meta.local_fields)
            for model in sorted(models, key=lambda model: model.__name__)
        },
    }


PROGRAM = """
import json, tests.support.plugin, django
django.setup()
from tests.site.test_wiring import wiring
print(json.dumps(wiring(), indent=1))
"""
"""Print the content of wiring.json. A new process is needed: other tests import more than Guardian does."""


def test_the_wiring_equals_the_recorded_one() -> None:
    environment = {**os.environ, "GUARDIAN_TEST_DATABASE": "sqlite", "DJANGO_SETTINGS_MODULE": "guardian_site.settings"}
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert json.loads(found.stdout) == json.loads(RECORDED.read_text())


def test_every_scheduled_or_routed_task_exists() -> None:
    app.loader.import_default_modules()
    assert {entry["task"] for entry in app.conf.beat_schedule.values()} <= set(app.tasks)
    assert set(app.conf.task_routes) <= set(app.tasks)
