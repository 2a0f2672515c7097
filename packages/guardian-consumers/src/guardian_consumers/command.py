"""``python -m guardian_consumers`` and ``manage.py consume``: the options, and what the exit codes mean."""

import importlib
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from guardian_consumers.consumer import Callback, Consumer, run_all
from guardian_consumers.errors import ConsumerError, Hung, Refused, SettingsError
from guardian_consumers.settings import ON_ERROR, QUEUE_TYPES, Settings

STOPPED, HALTED, INVALID_SETTING, REFUSED, HUNG = 0, 1, 2, 3, 4
"""Exit codes: a signal came; an exception stopped it; a setting or a name can't be used; the broker refuses for good;
a callback took longer than its time limit. After 1, 2 and 3 somebody has to look before it is started again."""

EXIT_CODES = (
    "Exit codes: 0 ended by a signal, the first of which lets it finish what it began; 1 an exception stopped it; "
    "2 a setting or a name can't be used; 3 the broker refuses for good; 4 a callback took longer than its time limit."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options. Those left out are read from the environment: see `Settings.from_environment`."""
    parser.add_argument(
        "functions",
        nargs="+",
        metavar="MODULE:FUNCTION[=KEY]",
        help="what is called with each message of the queue KEY; without it, of the queue named like the function",
    )
    parser.add_argument(
        "--routing-key",
        action="append",
        dest="routing_keys",
        metavar="KEY",
        help="bind the queue by this key, and not by its own; may be given several times, with one function alone",
    )
    parser.add_argument("--on-error", choices=ON_ERROR, help="what an exception means (default: retry)")
    parser.add_argument("--prefetch", metavar="N", help="young (1), grown (20), growing (the default), or a number")
    parser.add_argument("--threads", metavar="N", help="how many callbacks run at once (default: as many as prefetch)")
    parser.add_argument(
        "--retry-delays", metavar="SECONDS", help="before each further try, with commas (default: 10,60,600)"
    )
    parser.add_argument("--queue-type", choices=QUEUE_TYPES, help="(default: classic)")
    parser.add_argument(
        "--priorities", metavar="RANGES", help="the ranges that are kept apart, like 0-4,5-9; or broker (default: none)"
    )
    parser.add_argument(
        "--priority-ageing",
        metavar="SECONDS",
        help="with ranges: after each so many seconds of waiting a message counts as one level higher (default: never)",
    )
    parser.add_argument(
        "--metrics", metavar="[HOST:]PORT", help="serve figures to Prometheus there; without HOST, on 127.0.0.1"
    )


_VARIABLES = {
    "on_error": "RABBIT_ON_ERROR",
    "prefetch": "RABBIT_PREFETCH",
    "threads": "RABBIT_THREADS",
    "retry_delays": "RABBIT_RETRY_DELAYS",
    "queue_type": "RABBIT_QUEUE_TYPE",
    "priorities": "RABBIT_PRIORITIES",
    "priority_ageing": "RABBIT_PRIORITY_AGEING",
}


def consume(
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    report: Callable[[str], None],
    wrap: Callable[[Callback], Callback] = lambda callback: callback,
) -> int:
    """Consume until a signal comes, and return the exit code; ``report`` is told why where it is not 0.

    ``wrap`` makes of each function the one that is called.
    """
    try:
        given = {variable: str(options[name]) for name, variable in _VARIABLES.items() if options.get(name)}
        settings = Settings.from_environment({**environment, **given})
        consumers = _consumers(settings, options, wrap)
    except SettingsError as error:
        report(str(error))
        return INVALID_SETTING
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # what matters of what it says is said by the link
    try:
        with _metrics(options.get("metrics"), consumers):
            run_all(consumers)
    except ConsumerError as error:
        report(str(error))
        if isinstance(error, SettingsError):
            return INVALID_SETTING
        return HUNG if isinstance(error, Hung) else REFUSED if isinstance(error, Refused) else HALTED
    return STOPPED


def _metrics(at: str | None, consumers: list[Consumer]) -> AbstractContextManager[None]:
    if not at:
        return nullcontext()
    try:
        from guardian_consumers.metrics import serve_metrics
    except ModuleNotFoundError:
        raise SettingsError("--metrics needs prometheus-client: install guardian-consumers[metrics]") from None
    return serve_metrics(at, consumers)


def _consumers(settings: Settings, options: Mapping[str, Any], wrap: Callable[[Callback], Callback]) -> list[Consumer]:
    functions, routing_keys = options["functions"], options.get("routing_keys") or ()
    if routing_keys and len(functions) > 1:
        raise SettingsError("--routing-key is for one function alone")
    sources = []
    for function in functions:
        path, _, key = function.partition("=")
        sources.append((settings.source(key or path.rpartition(":")[2], tuple(routing_keys)), wrap(load(path))))
    keys = [source.key for source, _ in sources]
    if len(set(keys)) < len(keys):
        raise SettingsError(f"two functions would read one queue: {', '.join(keys)}; write MODULE:FUNCTION=KEY")
    return [Consumer(settings, source, callback) for source, callback in sources]


def load(path: str) -> Callback:
    """Return the function that MODULE:FUNCTION names. Raises SettingsError where there is none.

    What the module itself raises when it is imported goes through: its own traceback says most.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise SettingsError(f"{path!r} is not of the form MODULE:FUNCTION, like orders.work:ship")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise SettingsError(f"there is no module {error.name}; see {path!r}") from None
    function = getattr(found, name, None)
    if not callable(function):
        raise SettingsError(f"{module} has no function {name}")
    callback: Callback = function
    return callback
