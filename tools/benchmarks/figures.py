"""Results of benchmarks as lines of a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """A line of the table: a measurement and its floor.

    ``values`` and ``floor`` are in ``unit``. The floor is the least work that is possible, measured in the same run.
    ``limit`` is the target: the largest ratio of the medians, or without a floor the largest median. ``exact``: the
    target must be met exactly.
    """

    where: str
    what: str
    unit: str
    values: Sequence[float]
    floor: Sequence[float] = ()
    limit: float | None = None
    exact: bool = False

    @property
    def median(self) -> float:
        """The median, in ``unit``."""
        return median(self.values)

    @property
    def ratio(self) -> float | None:
        """The ratio of the median to the floor's."""
        return self.median / median(self.floor) if self.floor else None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target."""
        if self.limit is None:
            return None
        reached = self.median if self.ratio is None else self.ratio
        return reached == self.limit if self.exact else reached <= self.limit

    @property
    def target(self) -> str:
        """The target as text; empty without a target."""
        if self.limit is None:
            return ""
        target = f"{'=' if self.exact else '≤'} {self.limit:g}"
        return target if self.floor else f"{target} {self.unit}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """Return the line with all measurements, in order."""
        return {
            "where": self.where,
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
            "values": list(self.values),
            "floor": median(self.floor) if self.floor else None,
            "floor_values": list(self.floor),
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
        }


def show(console: Console, measured: Mapping[str, Sequence[Figure]]) -> None:
    """Print a table for each benchmark."""
    for name, figures in measured.items():
        title = f"{name} (ratio: of the median to the floor's)"
        table = Table(title=title, title_justify="left", box=None, collapse_padding=True, pad_edge=False)
        table.add_column("", no_wrap=True)
        for heading in ("median", "min-max", "floor", "ratio", "target"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for where, lines in groupby(figures, key=lambda figure: figure.where):
            table.add_row(f"[bold]{where}[/bold]")
            for figure in lines:
                table.add_row(*_cells(figure))
        console.print(table)


def _cells(figure: Figure) -> list[str]:
    unit = figure.unit
    lowest, highest = min(figure.values), max(figure.values)
    return [
        f"  {figure.what}",
        f"{_number(figure.median, unit)} {unit}".rstrip(),
        "" if lowest == highest else f"{_number(lowest, unit)}-{_number(highest, unit)}",
        f"{_number(median(figure.floor), unit)} {unit}".rstrip() if figure.floor else "",
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        figure.target,
        {None: "", True: "[green]met[/green]", False: "[bold red]missed[/bold red]"}[figure.met],
    ]


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "s" else f"{value:.0f}"
