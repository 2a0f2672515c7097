"""``make bench``: run benchmarks, print a table, write JSON to ``var/bench/``, and fail if a target was missed.

``python -m tools.benchmarks [NAME ...]`` only runs benchmarks whose names begin with these: ``consumers`` includes
``consumers_rate``. Everything uses a private broker and databases on 127.0.0.1, which end with this program.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rabbit.errors import BrokerError
from tools.benchmarks import (
    archiving,
    cascade,
    consumers,
    consumers_priority,
    consumers_rate,
    deleting,
    growth,
    memory,
    message_store,
    message_store_api,
    message_store_cassandra,
    message_store_worker,
    orphan_sweep,
    prometheus,
    publishing,
    queue_list,
    registrations,
    steady_pass,
    warned,
)
from tools.benchmarks.figures import Figure, show
from tools.benchmarks.services import PROJECT, Services, running
from tools.processes import StartError

BENCHMARKS: dict[str, Callable[[Services], list[Figure]]] = {
    "steady_pass": steady_pass.measure,
    "growth": growth.measure,
    "memory": memory.measure,
    "prometheus": prometheus.measure,
    "warned": warned.measure,
    "deleting": deleting.measure,
    "archiving": archiving.measure,
    "queue_list": queue_list.measure,
    "cascade": cascade.measure,
    "orphan_sweep": orphan_sweep.measure,
    "registrations": registrations.measure,
    "publishing": publishing.measure,
    "consumers": consumers.measure,
    "consumers_rate": consumers_rate.measure,
    "consumers_priority": consumers_priority.measure,
    "message_store": message_store.measure,
    "message_store_worker": message_store_worker.measure,
    "message_store_api": message_store_api.measure,
    "message_store_cassandra": message_store_cassandra.measure,
}
RESULTS = PROJECT / "var" / "bench"


def main() -> int:
    """Run the benchmarks. Return 1 if a target was missed, 2 if a benchmark failed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description="Run benchmarks, by default all.")
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    only = parser.parse_args().only
    unknown = [name for name in only if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark: {', '.join(unknown)}; choose from: {', '.join(BENCHMARKS)}")
    names = [name for name in BENCHMARKS if not only or any(f"{name}_".startswith(f"{one}_") for one in only)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # runs the clean-up
    console = Console()
    measured: dict[str, list[Figure]] = {}
    broken: list[str] = []
    try:
        with running(lambda text: console.print(f"[dim]{text}[/dim]", highlight=False)) as services:
            machine = {**_machine(), **services.versions()}
            for name in names:
                try:
                    measured[name] = BENCHMARKS[name](services)
                    _write(measured, machine)  # after each, since all take more than an hour
                except Exception as reason:  # a failure must not lose the results of the other benchmarks
                    broken.append(name)
                    console.print(f"not measured: {name}: {type(reason).__name__}: {reason}", style="red", markup=False)
    except (StartError, BrokerError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130
    show(console, measured)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), style="dim")
    missed = [(name, one) for name, figures in measured.items() for one in figures if one.met is False]
    for name, one in missed:
        console.print(
            f"missed: {name}, {one.where}: {one.what} {one.target}", style="red", markup=False, soft_wrap=True
        )
    if broken:
        console.print(f"not measured: {', '.join(broken)}", style="red", markup=False)
        return 2
    return 1 if missed else 0


def _machine() -> dict[str, str]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cores": str(os.cpu_count()), "processor": model[0].partition(": ")[2] if model else os.uname().machine}


def _write(measured: dict[str, list[Figure]], machine: dict[str, str]) -> None:
    """Write a file for each benchmark, and ``results.json`` with all results of this run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {"at": at, "machine": machine, "benchmarks": {}}
    for name, figures in measured.items():
        results["benchmarks"][name] = [figure.as_json() for figure in figures]
        _dump(name, {"at": at, "machine": machine, "figures": results["benchmarks"][name]})
    _dump("results", results)


def _dump(name: str, content: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
