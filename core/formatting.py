"""Numbers, durations and rates in words."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 message", "2,000 messages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    return f"{'growing' if per_second > 0 else 'shrinking'} by {counted(round(number), 'message')} {unit}"


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
            return counted(round(seconds / size), unit)
    return counted(round(seconds), "second")
