"""Durations and rates in words."""


def rate_in_words(per_second: float | None) -> str:
    """Return a queue's growth or shrinkage in words; empty if it is unknown."""
    if per_second is None:
        return ""
    if abs(per_second) < 1 / 3600:
        return "not growing"
    amount = abs(per_second)
    number, unit = (amount, "a second") if amount >= 1 else (amount * 60, "a minute")
    if number < 1:
        number, unit = amount * 3600, "an hour"
    messages = "message" if round(number) == 1 else "messages"
    return f"{'growing' if per_second > 0 else 'shrinking'} by {number:,.0f} {messages} {unit}"


def short_rate(per_second: float | None) -> str:
    """Return a queue's growth in a few characters, such as "+28/min"; empty if it is unknown."""
    if per_second is None:
        return ""
    sign = "+" if per_second > 0 else "\N{MINUS SIGN}"
    for seconds, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if abs(per_second) * seconds >= 1:
            return f"{sign}{abs(per_second) * seconds:,.0f}/{unit}"
    return "steady"


def duration(seconds: float | None) -> str:
    """Return a duration in words, in one unit; empty if it is unknown."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size * 1.5:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:,.0f} second{'' if round(seconds) == 1 else 's'}"
