"""A rule, its limits and levels, and the verdict on a value."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from core.formatting import duration


class Level(IntEnum):
    """The severity of a verdict. Critical: act now, for example because queues are not guarded."""

    OK = 0
    UNKNOWN = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        return "OK" if self is Level.OK else self.name.capitalize()

    @property
    def style(self) -> str:
        return "normal" if self is Level.OK else self.name.lower()


class Unit(StrEnum):
    """The unit of a value. A flag is 0 or 1."""

    SECONDS = "seconds"
    SHARE = "share"
    COUNT = "count"
    FLAG = "flag"


Limit = float | Callable[[Any], float] | None
"""A number, a function of the settings, or None: no limit."""


@dataclass(frozen=True)
class Rule:
    """A fact and its limits. A value reaches a limit if it is equal or greater.

    - ``sentence``: describes the problem, with ``{value}`` in words and the details that ``facts.py`` measures.
    - ``never``: replaces ``sentence`` for an infinite value.
    - ``runbook``: an anchor in docs/operators.md.
    - ``alert``: the Prometheus alert with the same limit; empty: there is none.
    - ``metric``: the gauge in ``/metrics`` with the value; empty: there is none.
    - ``page``: the name of the URL where an operator can act; empty: there is none.
    """

    name: str
    measures: str
    sentence: str
    next_step: str
    runbook: str
    unit: Unit = Unit.FLAG
    warning: Limit = None
    critical: Limit = None
    noun: str = ""
    never: str = ""
    alert: str = ""
    metric: str = ""
    page: str = ""

    def judge(self, value: float | None, settings: Any, **details: str) -> "Verdict":
        """Return the verdict on a value; None: the value is unknown."""
        if value is None:
            return Verdict(self, value, Level.UNKNOWN, f"unknown: {self.measures}", "")
        level = self._level(value, settings)
        if level is Level.OK:
            return Verdict(self, value, level, f"{self.measures}: {self.in_words(value)}", "")
        sentence = self.never if math.isinf(value) else self.sentence
        return Verdict(self, value, level, sentence.format(value=self.in_words(value), **details), self.next_step)

    def _level(self, value: float, settings: Any) -> Level:
        for level in (Level.CRITICAL, Level.WARNING):
            limit = self.limit(level, settings)
            if limit is not None and value >= limit:
                return level
        return Level.OK

    def limit(self, level: Level, settings: Any) -> float | None:
        limit = self.critical if level is Level.CRITICAL else self.warning
        return limit(settings) if callable(limit) else limit

    def in_words(self, value: float) -> str:
        if math.isinf(value):
            return "never"
        if self.unit is Unit.SECONDS:
            return duration(value) if value >= 10 else f"{round(value, 1):g} s"
        if self.unit is Unit.SHARE:
            return f"{value * 100:.0f} %"
        if self.unit is Unit.FLAG:
            return "yes" if value else "no"
        return f"{value:,.0f} {self.noun}{'' if value == 1 else 's'}"


class Verdict(NamedTuple):
    """A rule's judgement of a value. ``next_step`` is empty if nothing is wrong."""

    rule: Rule
    value: float | None
    level: Level
    sentence: str
    next_step: str

    @property
    def is_wrong(self) -> bool:
        """Whether an operator has to act."""
        return self.level >= Level.WARNING
