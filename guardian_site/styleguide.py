"""The page that shows all components in all states, in development only."""

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from accounts.pages.forms import ThresholdsForm
from queues.rules import charts
from queues.rules.states import Condition, Level
from queues.rules.thresholds import Thresholds
from rabbit.entities import RateSample

WORDS = {
    Level.NORMAL: "healthy",
    Level.WARNING: "over threshold",
    Level.CRITICAL: "deleted in 12 min",
    Level.UNKNOWN: "length unknown",
}
LENGTHS = {Level.NORMAL: 12, Level.WARNING: 2_400, Level.CRITICAL: 7_900, Level.UNKNOWN: 0}
LIMITS = Thresholds(2_000, 8_000)


@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """Show the style guide, or answer 404 outside development."""
    if not settings.DEBUG:
        raise Http404
    return render(request, "styleguide.html", context())


def context() -> dict[str, Any]:
    now = timezone.now()
    span = charts.SPANS["hour"]
    began = now - span.duration
    samples = [(began + timedelta(minutes=minute), 40 * minute + 90 * (minute % 7)) for minute in range(60)]
    rates = [RateSample(at, 40, 20 + length % 15, length % 7) for at, length in samples]
    rejected = ThresholdsForm(QueryDict("warn_length=many"))
    rejected.is_valid()
    return {
        "states": [Condition(level, word) for level, word in WORDS.items()],
        "lengths": [(level, length, charts.bar(length, LIMITS)) for level, length in LENGTHS.items()],
        "name": "queue/alice-builds/results-of-all-platforms-by-branch/linux64-opt",
        "at": now - timedelta(minutes=5),
        "form": ThresholdsForm(initial={"warn_length": 2_000}),
        "rejected": rejected,
        "chart": charts.chart(samples, began, now, LIMITS, has_maximum=True, to_limit=True),
        "chart_began": began,
        "times": charts.time_ticks(span, began, now),
        "marks": charts.marks([(began + timedelta(minutes=36), "reached its warning threshold")], began, now),
        "rate_chart": charts.rate_chart(rates, began, now),
        "thresholds": LIMITS,
        "there": True,
        "to_limit": True,
        "span": span,
        "spans": charts.SPANS.values(),
    }
