"""The page of the audit trail: what Guardian did about queues, and what people did, in one list by time.

Guardian's acts are the events of queues; people's are the entries of the audit trail. What a person does to a queue is
stored as both, and shown once, as the entry.
"""

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any, NamedTuple

from django import forms
from django.contrib.contenttypes.models import ContentType
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.http import require_safe

from accounts.admin.audit_trail import actor_of, details_of, thing_of
from accounts.models import AuditEntry, PulseUser
from core.formatting import counted
from queues.actions.endings import BY_PEOPLE, describe_event
from queues.models import Queue, QueueEvent
from queues.pages.visitors import Request
from rabbit.names import readable
from status.views import operation_page, operators_only

ROWS = 50

SHORT = forms.TextInput({"size": 16})
DATE = forms.DateInput({"type": "date"})
DAYS = [MinValueValidator(date(2000, 1, 1)), MaxValueValidator(date(2100, 1, 1))]


class TrailForm(forms.Form):
    queue = forms.CharField(required=False, max_length=255, widget=SHORT)
    pulse_user = forms.CharField(required=False, max_length=100, widget=SHORT, label="Pulse user")
    person = forms.CharField(required=False, max_length=254, widget=SHORT, label="By (address)")
    since = forms.DateField(required=False, widget=DATE, label="From", validators=DAYS)
    until = forms.DateField(required=False, widget=DATE, label="To", validators=DAYS)


@dataclass(frozen=True, order=True)
class Position:
    """A place in the list, which is sorted by it: the latest first."""

    at: datetime
    source: int
    id: int

    def __str__(self) -> str:
        return f"{self.at.isoformat()}~{self.source}~{self.id}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        """Return the position that ``str`` wrote, or None if this is not one."""
        at, _, key = text.partition("~")
        source, _, id_ = key.partition("~")
        try:
            position = cls(datetime.fromisoformat(at), int(source), int(id_))
        except ValueError:
            return None
        return position if timezone.is_aware(position.at) else None


class Act(NamedTuple):
    position: Position
    who: str
    what: str
    thing: str
    details: str
    outcome: str = ""


@operators_only
@require_safe
def audit_trail(request: Request) -> HttpResponse:
    """List what Guardian and people did, the latest first."""
    form = TrailForm(request.GET, label_suffix="")
    chosen = form.cleaned_data if form.is_valid() else {}
    acts = _acts(chosen, Position.parse(request.GET.get("before", "")))
    context: dict[str, Any] = {
        "form": form,
        "is_filtered": any(chosen.values()),
        "acts": acts[:ROWS],
        "next": str(acts[ROWS - 1].position) if len(acts) > ROWS else "",
    }
    return operation_page(request, "admin/operate/trail.html", "Audit trail", **context)


def _acts(chosen: dict[str, Any], before: Position | None) -> list[Act]:
    """Return a page of the list, and the act after it."""
    entries = _narrow(AuditEntry.objects.filter(_about(chosen)), "timestamp", 0, chosen, before)
    found = [_of_person(entry) for entry in entries.select_related("content_type")[: ROWS + 1]]
    if not chosen.get("person"):
        events = _narrow(QueueEvent.objects.filter(_of_queues(chosen)), "at", 1, chosen, before)
        found += [_of_guardian(event) for event in events.select_related("by", "queue")[: ROWS + 1]]
    return sorted(found, key=lambda act: act.position, reverse=True)[: ROWS + 1]


def _narrow(
    rows: QuerySet[Any], field: str, source: int, chosen: dict[str, Any], before: Position | None
) -> QuerySet[Any]:
    """Return the rows of the chosen days that come after a position, in the order of the list."""
    if day := chosen.get("since"):
        rows = rows.filter(**{f"{field}__gte": _start_of(day)})
    if day := chosen.get("until"):
        rows = rows.filter(**{f"{field}__lt": _start_of(day) + timedelta(days=1)})
    if before:
        same_time = Q(**{field: before.at})
        if source == before.source:
            same_time &= Q(id__lt=before.id)
        earlier = Q(**{f"{field}__lt": before.at})
        rows = rows.filter(earlier if source > before.source else earlier | same_time)
    return rows.order_by(f"-{field}", "-id")


def _start_of(day: Any) -> datetime:
    return timezone.make_aware(datetime.combine(day, time()))


def _about(chosen: dict[str, Any]) -> Q:
    """Return the condition of people's acts. The trail has things by name, because they may be gone."""
    condition = Q()
    if name := chosen.get("queue"):
        # Its archives and moves have its name, too.
        condition &= Q(object_repr__icontains=name, content_type__app_label=Queue._meta.app_label)
    if name := chosen.get("pulse_user"):
        is_user = Q(object_repr=name, content_type=ContentType.objects.get_for_model(PulseUser))
        condition &= is_user | Q(object_repr__contains=f"queue/{name}/")
    if address := chosen.get("person"):
        condition &= Q(actor_email__icontains=address)
    return condition


def _of_queues(chosen: dict[str, Any]) -> Q:
    """Return the condition of Guardian's acts. A queue is also removed with its Pulse user, by nobody."""
    condition = ~Q(kind__in=BY_PEOPLE) | Q(kind=QueueEvent.Kind.REMOVED, by=None)
    if name := chosen.get("queue"):
        condition &= Q(queue_name__icontains=name)
    if name := chosen.get("pulse_user"):
        condition &= Q(queue__pulse_user__username=name) | Q(queue_name__startswith=f"queue/{name}/")
    return condition


def _of_person(entry: AuditEntry) -> Act:
    position = Position(entry.timestamp, 0, entry.pk)
    outcome = "" if entry.outcome == AuditEntry.Outcome.DONE else entry.get_outcome_display()
    kind = entry.content_type.name if entry.content_type else ""
    # A queue's name says what it is.
    thing = thing_of(entry) if kind == Queue._meta.verbose_name else format_html("{} {}", kind, thing_of(entry))
    return Act(position, actor_of(entry), entry.event, thing, "; ".join(details_of(entry)), outcome)


def _of_guardian(event: QueueEvent) -> Act:
    what, more, who = describe_event(event)
    name = readable(event.queue_name)
    if event.queue:
        name = format_html('<a href="{}">{}</a>', reverse("queue", args=[event.queue.uuid]), name)
    length = event.details.get("length")
    details = [*([counted(length, "message")] if isinstance(length, int) else []), *([more] if more else [])]
    return Act(Position(event.at, 1, event.pk), who or "Guardian", what, name, "; ".join(details))
