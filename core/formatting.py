"""Numbers, durations and rates in words."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: "1 message", "2,000 messages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


MINUS = "\N{MINUS SIGN}"


def rate_in_words(per_second: float | None) -> str:
    """Return a queue's growth or shrinkage in words, or an empty text if it is unknown."""
    if per_second is None:
        return ""
    if abs(per_second) < 1 / 3600:
        return "not growing"
    return f"{'growing' if per_second > 0 else 'shrinking'} by {messages_per(abs(per_second))}"


def messages_per(per_second: float, *, beside: float | None = None) -> str:
    """Return a rate in words: "28 messages a minute", "no messages"; in the unit of the smaller one ``beside`` it."""
    smaller = min((rate for rate in (per_second, beside) if rate), default=0.0)
    _, unit = _with_two_digits(smaller)
    number = per_second * {"s": 1, "min": 60, "h": 3600}[unit]
    every = {"s": "a second", "min": "a minute", "h": "an hour"}[unit]
    return f"{counted(round(number), 'message')} {every}" if round(number) else "no messages"


def short_rate(per_second: float | None) -> str:
    """Return a queue's growth in a few characters, such as "+28/min", or an empty text if it is unknown."""
    if per_second is None:
        return ""
    number, unit = _with_two_digits(abs(per_second))
    return f"{'+' if per_second > 0 else MINUS}{number:,.0f}/{unit}" if number >= 1 else "steady"


def _with_two_digits(per_second: float) -> tuple[float, str]:
    """Return a rate in the shortest unit in which it has two digits; below ten an hour, in hours."""
    return next(
        ((per_second * seconds, unit) for seconds, unit in ((1, "s"), (60, "min")) if per_second * seconds >= 9.5),
        (per_second * 3600, "h"),
    )


def duration(seconds: float | None) -> str:
    """Return a duration in words, in one unit, or an empty text if it is unknown."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size * 1.5:
            return counted(round(seconds / size), unit)
    return counted(round(seconds), "second")


def short_duration(seconds: float) -> str:
    """Return a duration in a few characters, such as "12 min"."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size * 1.5:
            return f"{round(seconds / size):,} {unit}"
    return f"{round(seconds)} s"


RELATIVE_DAYS = 30


def relative(seconds_ago: float) -> str:
    """Return a time relative to now, such as "5 min ago" or "in 6 d", or an empty text if it is far away."""
    if abs(seconds_ago) < 1:
        return "just now"
    if abs(seconds_ago) > RELATIVE_DAYS * 86_400:
        return ""
    words = short_duration(abs(seconds_ago))
    return f"{words} ago" if seconds_ago > 0 else f"in {words}"
