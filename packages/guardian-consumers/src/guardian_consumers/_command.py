"""Options and exit codes of ``consume``, ``python -m guardian_consumers`` and ``manage.py consume``."""

import importlib
import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from guardian_consumers._asynchronous import AsyncConsumer
from guardian_consumers._consumer import Callback, Consumer, run_all
from guardian_consumers._errors import ConsumerError, Hung, Refused, SettingsError
from guardian_consumers._handler import is_coroutine_function
from guardian_consumers._settings import ON_ERROR, QUEUE_TYPES, Settings

STOPPED, HALTED, INVALID_SETTING, REFUSED, HUNG = 0, 1, 2, 3, 4
"""Exit codes. After 1, 2 and 3 an operator should find the cause before a restart."""

EXIT_CODES = (
    "Exit codes: 0 stopped by a signal (the first lets callbacks finish); 1 an exception stopped it; 2 a setting or "
    "name is invalid; 3 the broker refuses permanently; 4 a callback exceeded its time limit."
)


_SETTINGS: dict[str, dict[str, Any]] = {
    "on_error": {"choices": ON_ERROR, "help": "the outcome of an exception (default: retry)"},
    "prefetch": {"metavar": "N", "help": "young (1), grown (20), growing (the default), or a number"},
    "threads": {"metavar": "N", "help": "concurrent callbacks (default: the prefetch)"},
    "retry_delays": {"metavar": "SECONDS", "help": "comma-separated delays before each retry (default: 10,60,600)"},
    "queue_type": {"choices": QUEUE_TYPES, "help": "(default: classic)"},
    "priorities": {
        "metavar": "RANGES",
        "help": "ranges of priorities with their own queues, such as 0-4,5-9; or broker (default: none)",
    },
    "priority_ageing": {
        "metavar": "SECONDS",
        "help": "with ranges: waiting messages rise one level per interval (default: never)",
    },
}
"""The options that precede the variable of their name."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options. Defaults come from the environment: see `Settings.from_environment`."""
    parser.add_argument(
        "functions",
        nargs="+",
        metavar="MODULE:FUNCTION[=KEY]",
        help="the callback for the messages of the queue KEY (default: the function's name)",
    )
    parser.add_argument(
        "--routing-key",
        action="append",
        dest="routing_keys",
        metavar="KEY",
        help="bind the queue with this routing key instead of its own; repeatable, with a single function only",
    )
    for name, options in _SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument(
        "--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics there (default host: 127.0.0.1)"
    )


def consume(
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    report: Callable[[str], None],
    wrap: Callable[[Callback], Callback] = lambda callback: callback,
) -> int:
    """Consume until a signal, and return the exit code. Call ``report`` with the reason if it is not 0.

    ``wrap`` decorates each callback.
    """
    try:
        given = {f"RABBIT_{name.upper()}": str(options[name]) for name in _SETTINGS if options.get(name)}
        settings = Settings.from_environment({**environment, **given})
        consumers = _consumers(settings, options, wrap)
    except SettingsError as error:
        report(str(error))
        return INVALID_SETTING
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # Link logs what matters
    try:
        with _metrics(options.get("metrics"), consumers):
            run_all(consumers)
    except ConsumerError as error:
        report(str(error))
        if isinstance(error, SettingsError):
            return INVALID_SETTING
        return HUNG if isinstance(error, Hung) else REFUSED if isinstance(error, Refused) else HALTED
    return STOPPED


def set_up_django() -> None:
    """Set up the project of DJANGO_SETTINGS_MODULE. Raises SettingsError if Django is missing."""
    try:
        import django
    except ModuleNotFoundError:
        raise SettingsError(
            "DJANGO_SETTINGS_MODULE is set, but Django is missing: install guardian-consumers[django], or unset it"
        ) from None
    django.setup()
    # The project's LOGGING may disable the loggers that exist before.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("guardian_consumers.") and isinstance(logger, logging.Logger):
            logger.disabled = False


def consume_in_django(options: Mapping[str, Any], report: Callable[[str], None]) -> int:
    """Consume with fresh database connections. RABBIT_URL defaults to the Django setting of that name."""
    from django.conf import settings

    from guardian_consumers.django import with_fresh_connections

    url: str = os.environ.get("RABBIT_URL") or getattr(settings, "RABBIT_URL", None) or ""
    return consume(options, {**os.environ, "RABBIT_URL": url}, report, with_fresh_connections)


def _metrics(at: str | None, consumers: list[Consumer]) -> AbstractContextManager[None]:
    if not at:
        return nullcontext()
    try:
        from guardian_consumers.metrics import serve_metrics
    except ModuleNotFoundError:
        raise SettingsError("--metrics needs prometheus-client: install guardian-consumers[prometheus]") from None
    return serve_metrics(at, consumers)


def _consumers(settings: Settings, options: Mapping[str, Any], wrap: Callable[[Callback], Callback]) -> list[Consumer]:
    functions, routing_keys = options["functions"], options.get("routing_keys") or ()
    if routing_keys and len(functions) > 1:
        raise SettingsError("--routing-key needs a single function")
    sources = []
    for function in functions:
        path, _, key = function.partition("=")
        sources.append((settings.source(key or path.rpartition(":")[2], tuple(routing_keys)), wrap(load(path))))
    keys = [source.key for source, _ in sources]
    if len(set(keys)) < len(keys):
        raise SettingsError(f"two functions have the same queue: {', '.join(keys)}; write MODULE:FUNCTION=KEY")
    return [
        (AsyncConsumer if is_coroutine_function(callback) else Consumer)(settings, source, callback)
        for source, callback in sources
    ]


def load(path: str) -> Callback:
    """Return the function MODULE:FUNCTION. Raises SettingsError if it does not exist.

    Exceptions of the module's own code propagate, with their tracebacks.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise SettingsError(f"{path!r} is not of the form MODULE:FUNCTION, such as orders.work:ship")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise SettingsError(f"module {error.name} does not exist; see {path!r}") from None
    function = getattr(found, name, None)
    if not callable(function):
        raise SettingsError(f"{module} has no function {name}")
    callback: Callback = function
    return callback
