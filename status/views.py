"""The admin's front page and the actions on it. Actions that delete queues show a preview first.

All views are for operators only, and have the admin's headers against caching and its CSRF protection.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django import forms
from django.contrib import admin
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe
from django_htmx.http import HttpResponseClientRefresh

from accounts import audit
from accounts.models import Owner
from agents.models import Sweep
from agents.sweeps import reports, stale, sweep
from core.formatting import counted, duration
from queues.guard import monitor, pass_run
from queues.pages.visitors import Request
from rabbit.names import QueueName, readable
from status import overview
from status.verdicts import Level

NAMES_SHOWN = 100

DELETIONS_PER_SECOND = 200
"""A healthy broker deletes at least this many queues a second."""

View = Callable[[Request], HttpResponse]


def operators_only(view: View) -> View:
    """Restrict a view to operators, like the admin's own. An htmx request of anybody else reloads the whole page."""
    guarded = admin.site.admin_view(view)

    @wraps(view)
    def decorated(request: Request) -> HttpResponse:
        if request.htmx and not admin.site.has_permission(request):
            return HttpResponseClientRefresh()
        return guarded(request)

    return decorated


@operators_only
@require_safe
def front_page(request: Request) -> HttpResponse:
    """Show what waits for operators, and the health of the broker and of Guardian, above the list of models."""
    return admin.site.index(request, {"title": "Administration", "overview": overview.overview(timezone.now())})


class ActionOutcome(NamedTuple):
    """The outcome of an action, for its page. ``did`` lists what it did; ``to`` is the name of a URL to continue at."""

    level: Level
    sentence: str
    did: Sequence[str] = ()
    errors: Sequence[str] = ()
    status: HTTPStatus = HTTPStatus.OK
    to: str = ""


class Names(NamedTuple):
    """Names and vhosts of the first queues in a list, and the number of the others."""

    shown: Sequence[tuple[str, str]]
    more: int


def names(queues: Sequence[dict[str, str]]) -> Names:
    shown = [(readable(one["queue"]), readable(one["vhost"])) for one in queues[:NAMES_SHOWN]]
    return Names(shown, len(queues) - len(shown))


# A pass


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_pass(request: Request) -> HttpResponse:
    outcome = None
    if request.method == "POST":
        audit.record(request.user, "requested a pass", None)
        outcome = pass_outcome(monitor.run_pass())
    return operation_page(request, "admin/operate/pass.html", "Run a pass now", outcome)


def pass_outcome(report: pass_run.Report) -> ActionOutcome:
    errors = [readable(error) for error in report.errors]
    if report.another_pass:
        sentence = "Another pass is running, so this one did nothing. The other pass does the same."
        return ActionOutcome(Level.WARNING, sentence, errors=errors, status=HTTPStatus.CONFLICT)
    if report.away:
        sentence = "The broker does not answer, so nothing was done. Guardian tries again automatically."
        return ActionOutcome(Level.CRITICAL, sentence, errors=errors, status=HTTPStatus.SERVICE_UNAVAILABLE)
    if report.given_up:
        sentence = "The lease expired before the pass was done. The next pass continues from there."
        return ActionOutcome(Level.CRITICAL, sentence, errors=errors)
    did = [
        f"{counted(report.queues, 'queue')} in {report.seconds:.2f} s, of which the list took "
        f"{report.listing_seconds:.2f} s",
        f"{report.new:,} new, {report.changed:,} changed, {report.gone:,} gone",
        f"{report.warned:,} over their warning threshold, {report.recovered:,} back to normal",
        f"{len(report.decided):,} to be deleted now",
    ]
    if report.brake_held:
        return ActionOutcome(
            Level.WARNING,
            "The pass is done. The deletion of some queues is blocked until you decide.",
            did,
            errors,
            to="operate_brake",
        )
    if errors:
        return ActionOutcome(Level.WARNING, "The pass is done, with errors.", did, errors)
    return ActionOutcome(Level.OK, "The pass is done.", did)


# Previews and their confirmation


PREVIEW_SECONDS = 600
"""A preview can be confirmed during this time."""


class ConfirmationForm(forms.Form):
    """The key of the confirmed preview, and whether to override the brake for it."""

    shown = forms.UUIDField()
    force = forms.BooleanField(required=False)


def store_preview(by: Owner, action: str, preview: Any) -> UUID:
    """Store the preview of an action for this operator, and return its key for the form."""
    key = uuid4()
    cache.set(_cache_key(by, action, key), preview, PREVIEW_SECONDS)
    return key


def pop_preview(by: Owner, action: str, key: UUID) -> Any:
    """Return and delete the preview with this key; None: it expired, was confirmed already, or never existed."""
    cache_key = _cache_key(by, action, key)
    preview = cache.get(cache_key)
    return preview if cache.delete(cache_key) else None


def _cache_key(by: Owner, action: str, key: UUID) -> str:
    return f"shown:{action}:{by.pk}:{key.hex}"


NOTHING_SELECTED = ActionOutcome(
    Level.WARNING, "You selected no queue, so nothing was done.", status=HTTPStatus.BAD_REQUEST
)

EXPIRED = ActionOutcome(
    Level.WARNING,
    "The preview has expired, or was confirmed already, so nothing was done. This is a new preview.",
    status=HTTPStatus.CONFLICT,
)


def _pairs(queues: Sequence[dict[str, str]]) -> list[QueueName]:
    return [(one["vhost"], one["queue"]) for one in queues]


# The clean-ups


class CleanUp(NamedTuple):
    """One of the two clean-ups, with the texts of its page. ``affected`` returns what a dry run's preview covers."""

    title: str
    audited: str
    run: Callable[..., reports.Report]
    affected: Callable[[reports.Report], Iterable[Any]]
    about: str


CLEAN_UPS = {
    Sweep.Kind.ORPHANS: CleanUp(
        "Sweep orphans",
        "requested a sweep of orphans",
        sweep.sweep_orphans,
        lambda report: _pairs(report.would_delete + report.in_use),
        "The sweep deletes agents' queues that have no registration, and declares registered queues again that the "
        "broker lacks. Queues with consumers are kept.",
    ),
    Sweep.Kind.STALE: CleanUp(
        "Clean up stale subscriptions",
        "requested a clean-up of stale subscriptions",
        stale.clean_up_stale,
        lambda report: report.stale,
        "The clean-up removes expired tokens, and the registrations and queues of owners without a valid token.",
    ),
}


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_orphans(request: Request) -> HttpResponse:
    """Show a preview of a sweep of orphans. On confirmation, run it."""
    return _clean_up(request, Sweep.Kind.ORPHANS)


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_stale(request: Request) -> HttpResponse:
    """Show a preview of a clean-up of stale subscriptions. On confirmation, run it."""
    return _clean_up(request, Sweep.Kind.STALE)


def _clean_up(request: Request, kind: Sweep.Kind) -> HttpResponse:
    clean_up, template = CLEAN_UPS[kind], "admin/operate/clean_up.html"
    outcome = None
    if request.method == "POST":
        form = ConfirmationForm(request.POST)
        confirmed = pop_preview(request.user, kind.value, form.cleaned_data["shown"]) if form.is_valid() else None
        if confirmed is not None:
            force = form.cleaned_data["force"]
            audit.record(request.user, clean_up.audited, None, agreed_to=len(confirmed), force=force)
            report = clean_up.run(force=force, only=confirmed)
            kept = {"in_use": names(report.in_use), "left_out": names(report.left_out)}
            return operation_page(request, template, clean_up.title, sweep_outcome(report), **kept)
        outcome = EXPIRED
    preview = clean_up.run(dry_run=True)
    if preview.away:
        return operation_page(request, template, clean_up.title, sweep_outcome(preview))
    context: dict[str, Any] = {
        "about": clean_up.about,
        "look": preview,
        "queues": names(preview.would_delete),
        "repairs": names(preview.would_repair),
        "in_use": names(preview.in_use),
        "takes": duration(max(1.0, preview.seconds + preview.found / DELETIONS_PER_SECOND)),
        "errors": [readable(error) for error in preview.errors],
    }
    if preview.found or preview.repaired or preview.logins or preview.users or preview.subscriptions or preview.tokens:
        context["key"] = store_preview(request.user, kind.value, frozenset(clean_up.affected(preview)))
    return operation_page(request, template, clean_up.title, outcome, **context)


def sweep_outcome(report: reports.Report) -> ActionOutcome:
    errors = [readable(error) for error in report.errors]
    if report.another_sweep:
        sentence = "Another clean-up is running, so this one did nothing. The front page will show the other's report."
        return ActionOutcome(Level.WARNING, sentence, status=HTTPStatus.CONFLICT)
    did = [f"{counted(report.deleted, 'queue')} deleted of {report.seen:,}", f"{report.kept:,} kept"]
    if report.kind == Sweep.Kind.ORPHANS:
        did += [f"{report.repaired:,} declared again", f"{report.users:,} RabbitMQ users removed"]
    else:
        tokens = f"{counted(report.tokens, 'expired token')} removed"
        did = [did[0], f"{report.subscriptions:,} subscriptions and consumers removed, {tokens}"]
    did.append(f"{report.seconds:.1f} s")
    if report.away:
        sentence = (
            "The broker does not answer, or stopped answering. Guardian automatically completes what was started."
        )
        return ActionOutcome(
            Level.CRITICAL, sentence, did if report.seen else (), errors, HTTPStatus.SERVICE_UNAVAILABLE
        )
    if report.given_up:
        return ActionOutcome(
            Level.CRITICAL,
            "The lease expired before the clean-up was done. The next one continues from there.",
            did,
            errors,
        )
    if report.brake_held:
        return ActionOutcome(
            Level.WARNING, "The brake blocked it: too many queues would be deleted at once, so none was.", did, errors
        )
    if errors:
        return ActionOutcome(Level.WARNING, "It is done, with errors.", did, errors)
    if report.left_out:
        return ActionOutcome(
            Level.WARNING, "It is done. What the preview did not show was kept. Refresh to see it.", did
        )
    return ActionOutcome(Level.OK, "It is done.", did)


def operation_page(
    request: HttpRequest, template: str, title: str, outcome: ActionOutcome | None = None, **context: Any
) -> HttpResponse:
    """Render a page of an operation, with its outcome if it was done."""
    context = {**admin.site.each_context(request), "title": title, "result": outcome, **context}
    return TemplateResponse(request, template, context, status=outcome.status if outcome else HTTPStatus.OK)
