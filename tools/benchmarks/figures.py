"""Figures of benchmarks, and how they are measured and printed."""

import gc
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """A line of the table: a measurement and its floor.

    ``values`` and ``floor`` are in ``unit``. The floor is the least work that is possible, measured in the same run.
    ``limit`` is the target: the largest ratio of the medians, or without a floor the largest median.
    """

    where: str
    what: str
    unit: str
    values: Sequence[float]
    floor: Sequence[float] = ()
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        return median(self.values) / median(self.floor) if self.floor else None

    @property
    def missed(self) -> bool:
        return self.limit is not None and (self.ratio or median(self.values)) > self.limit

    @property
    def target(self) -> str:
        """The target as text; empty without a target."""
        if self.limit is None:
            return ""
        return f"≤ {self.limit:.3g}" if self.floor else f"≤ {self.limit:g} {self.unit}"


def show(console: Console, title: str, figures: Sequence[Figure]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("median", "ratio", "target", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for where, lines in groupby(figures, key=lambda figure: figure.where):
        table.add_row(f"[bold]{where}[/bold]")
        for figure in lines:
            digits = 3 if figure.unit == "s" else 0
            table.add_row(
                f"  {figure.what}",
                f"{median(figure.values):.{digits}f} {figure.unit}".rstrip(),
                "" if figure.ratio is None else f"{figure.ratio:.2f}",
                figure.target,
                "[bold red]missed[/bold red]" if figure.missed else "",
            )
    console.print(table)


def in_turn(
    rounds: int, *, warm_ups: int = 1, before: Callable[[], object] = lambda: None, **measurements: Callable[[], float]
) -> dict[str, list[float]]:
    """Return what each of the measurements returns in each round. They alternate, so that all have the same noise.

    ``before`` is called at the beginning of each round. The results of the first ``warm_ups`` rounds don't count.
    """
    found: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(-warm_ups, rounds):
        before()
        for name in found if number % 2 else reversed(found):
            value = measurements[name]()
            if number >= 0:
                found[name].append(value)
    return found


def timed(do: Callable[[], T]) -> tuple[float, T]:
    gc.collect()  # so that no call pays for the garbage of an earlier one
    began = time.perf_counter()
    result = do()
    return time.perf_counter() - began, result


def seconds(do: Callable[[], object]) -> float:
    return timed(do)[0]


def peak_megabytes() -> float:
    """Return the peak memory of this process in MB of a million bytes."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    return int(peak[1]) * 1024 / 1e6
