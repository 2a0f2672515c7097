"""The front page of the administration, and what operators do from it. What destroys shows first what it would do.

Every view here is the administration's: for operators alone, kept nowhere, and with the CSRF token.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe
from django_htmx.http import HttpResponseClientRefresh

from accounts import audit
from accounts.models import Owner
from agents import reports, stale, sweep
from agents.models import Sweep
from core.formatting import duration
from queues import brake, monitor, pass_run
from queues.thresholds import brake_limit
from queues.views import Request
from rabbit.names import QueueName, readable
from status import overview
from status.rules import Level

NAMES_SHOWN = 100

DELETED_IN_A_SECOND = 200
"""So many queues the broker deletes in a second, at least, as long as it is well."""

View = Callable[[Request], HttpResponse]


def operators_only(view: View) -> View:
    """Let only operators in, as the administration does. A page that refreshes itself is loaded anew for others."""
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
    """Show how the broker and Guardian are, above Django's list; to htmx the figures alone."""
    context = {"title": "The broker and Guardian", "overview": overview.overview(timezone.now())}
    if request.htmx:
        return render(request, "admin/_overview.html", context)
    return admin.site.index(request, context)


class Told(NamedTuple):
    """What became of a deed: how well it went, in a sentence, what it did, what went wrong, and where to go on."""

    level: Level
    sentence: str
    did: Sequence[str] = ()
    errors: Sequence[str] = ()
    status: HTTPStatus = HTTPStatus.OK
    to: str = ""


class Names(NamedTuple):
    """Some queues, each with its name and its vhost, and how many more there are."""

    shown: Sequence[tuple[str, str]]
    more: int


def names(queues: Sequence[dict[str, str]]) -> Names:
    """Return the first of these queues as they can be shown."""
    shown = [(readable(one["queue"]), readable(one["vhost"])) for one in queues[:NAMES_SHOWN]]
    return Names(shown, len(queues) - len(shown))


# A pass


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_pass(request: Request) -> HttpResponse:
    """Run a pass now, and show what it did."""
    told = None
    if request.method == "POST":
        audit.note(request.user, "asked for a pass", None)
        told = pass_in_words(monitor.run_pass())
    return _page(request, "admin/operate/pass.html", "Run a pass now", told)


def pass_in_words(report: pass_run.Report) -> Told:
    """Return what became of a pass."""
    errors = [readable(error) for error in report.errors]
    if report.another_pass:
        what = "Another pass is being made right now, so nothing was done. It does the same."
        return Told(Level.WARNING, what, errors=errors, status=HTTPStatus.CONFLICT)
    if report.away:
        what = "The broker could not be asked, so nothing was done. Guardian tries again by itself."
        return Told(Level.CRITICAL, what, errors=errors, status=HTTPStatus.SERVICE_UNAVAILABLE)
    if report.given_up:
        what = "The pass took so long that its lease ran out. The next one goes on from there."
        return Told(Level.CRITICAL, what, errors=errors)
    did = [
        f"{_queues(report.queues)} in {report.seconds:.2f} s; the list took {report.listing_seconds:.2f} s of it",
        f"{report.new:,} new, {report.changed:,} changed, {report.gone:,} gone",
        f"{report.warned:,} warned about, {report.recovered:,} back to normal",
        f"{report.deleted:,} deleted, {report.kept:,} kept after the second look",
    ]
    if report.brake_held:
        return Told(
            Level.WARNING,
            "The pass is done, and the brake held: too many queues would go at once.",
            did,
            errors,
            to="operate_brake",
        )
    if errors:
        return Told(Level.WARNING, "The pass is done, and not all went well.", did, errors)
    return Told(Level.OK, "The pass is done.", did)


# What was shown, and is agreed to

SHOWN_FOR_SECONDS = 600
"""For so long an operator may agree to what a page showed."""


class Agreed(forms.Form):
    """What an operator agrees to: the key of what was shown, and whether the brake may be lifted for that."""

    shown = forms.UUIDField()
    force = forms.BooleanField(required=False)


def keep_shown(by: Owner, deed: str, what: Any) -> UUID:
    """Keep what this operator is shown before a deed, and return the key for the form that agrees to it."""
    key = uuid4()
    cache.set(_place(by, deed, key), what, SHOWN_FOR_SECONDS)
    return key


def take_shown(by: Owner, deed: str, key: UUID) -> Any:
    """Return what this operator was shown under this key, once; None: too long ago, agreed to already, or never."""
    place = _place(by, deed, key)
    what = cache.get(place)
    return what if cache.delete(place) else None


def _place(by: Owner, deed: str, key: UUID) -> str:
    return f"shown:{deed}:{by.pk}:{key.hex}"


TOO_LATE = Told(
    Level.WARNING,
    "What you agreed to was shown too long ago, or was agreed to already, so nothing was done. This is how it is now.",
    status=HTTPStatus.CONFLICT,
)


def _pairs(queues: Sequence[dict[str, str]]) -> list[QueueName]:
    return [(one["vhost"], one["queue"]) for one in queues]


# The brake


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_brake(request: Request) -> HttpResponse:
    """Show which queues the brake keeps, and let the next pass delete these, once an operator says so."""
    template, title = "admin/operate/brake.html", "Release the brake"
    told = None
    if request.method == "POST":
        agreed = Agreed(request.POST)
        if agreed.is_valid() and (queues := take_shown(request.user, "brake", agreed.cleaned_data["shown"])):
            brake.release_brake(request.user, queues)
            if number := brake.brake().released:
                messages.success(request, f"The next pass, within ten minutes, may delete {_queues(number)}.")
            else:
                messages.warning(request, "The brake doesn't hold any more, so there was nothing to release.")
            return redirect("admin:index")
        told = TOO_LATE
    since = brake.brake().since
    if since is None:
        return _page(request, template, title, told, is_free=True)
    look = monitor.run_pass(dry_run=True, force=True)
    if look.away:
        return _page(request, template, title, pass_in_words(look))
    context: dict[str, Any] = {
        "since": since,
        "queues": names(look.condemned),
        "number": len(look.condemned),
        "kept": look.kept,
        "limit": brake_limit(settings.GUARDIAN_DELETE_BRAKE, look.queues),
        "errors": [readable(error) for error in look.errors],
    }
    if look.condemned:
        context["key"] = keep_shown(request.user, "brake", _pairs(look.condemned))
    return _page(request, template, title, told, **context)


# The clean-ups


class CleanUp(NamedTuple):
    """One of the two clean-ups, with what its page says. ``shown`` is what an operator who sees a look agrees to."""

    title: str
    deed: str
    do: Callable[..., reports.Report]
    shown: Callable[[reports.Report], Iterable[Any]]
    about: str


CLEAN_UPS = {
    Sweep.Kind.ORPHANS: CleanUp(
        "Sweep orphans",
        "asked for a sweep of orphans",
        sweep.sweep_orphans,
        lambda look: _pairs(look.would_delete + look.in_use),
        "It deletes the agents' queues that no registration stands for, and makes again those that are registered and "
        "missing. A queue is kept as long as somebody reads from it.",
    ),
    Sweep.Kind.STALE: CleanUp(
        "Clean up stale subscriptions",
        "asked for a clean-up of stale subscriptions",
        stale.clean_up_stale,
        lambda look: look.stale,
        "It removes what the agents of owners without a live token registered, with its queues, and expired tokens.",
    ),
}


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_orphans(request: Request) -> HttpResponse:
    """Show what a sweep of orphans would do, and do that."""
    return _clean_up(request, Sweep.Kind.ORPHANS)


@operators_only
@require_http_methods(["GET", "HEAD", "POST"])
def operate_stale(request: Request) -> HttpResponse:
    """Show what a clean-up of stale subscriptions would do, and do that."""
    return _clean_up(request, Sweep.Kind.STALE)


def _clean_up(request: Request, kind: Sweep.Kind) -> HttpResponse:
    one, template = CLEAN_UPS[kind], "admin/operate/clean_up.html"
    told = None
    if request.method == "POST":
        agreed = Agreed(request.POST)
        shown = take_shown(request.user, kind.value, agreed.cleaned_data["shown"]) if agreed.is_valid() else None
        if shown is not None:
            force = agreed.cleaned_data["force"]
            audit.note(request.user, one.deed, None, agreed_to=len(shown), force=force)
            report = one.do(force=force, only=shown)
            kept = {"in_use": names(report.in_use), "left_out": names(report.left_out)}
            return _page(request, template, one.title, sweep_in_words(report), **kept)
        told = TOO_LATE
    look = one.do(dry_run=True)
    if look.away:
        return _page(request, template, one.title, sweep_in_words(look))
    shown = frozenset(one.shown(look))
    context: dict[str, Any] = {
        "about": one.about,
        "look": look,
        "queues": names(look.would_delete),
        "repairs": names(look.would_repair),
        "in_use": names(look.in_use),
        "takes": duration(max(1.0, look.seconds + look.found / DELETED_IN_A_SECOND)),
        "errors": [readable(error) for error in look.errors],
    }
    if look.found or look.repaired or look.logins or look.users or look.subscriptions or look.tokens:
        context["key"] = keep_shown(request.user, kind.value, shown)
    return _page(request, template, one.title, told, **context)


def sweep_in_words(report: reports.Report) -> Told:
    """Return what became of a clean-up."""
    errors = [readable(error) for error in report.errors]
    if report.another_sweep:
        what = "Another process is at it right now, so nothing was done here. Its report is on the front page soon."
        return Told(Level.WARNING, what, status=HTTPStatus.CONFLICT)
    did = [f"{_queues(report.deleted)} deleted of {report.seen:,}", f"{report.kept:,} kept"]
    if report.kind == Sweep.Kind.ORPHANS:
        did += [f"{report.repaired:,} made again", f"{report.users:,} RabbitMQ users removed"]
    else:
        tokens = f"{report.tokens:,} expired token{'' if report.tokens == 1 else 's'} removed"
        did = [did[0], f"{report.subscriptions:,} subscriptions and consumers, {tokens}"]
    did.append(f"{report.seconds:.1f} s")
    if report.away:
        what = "The broker could not be asked, or went away in the middle. What was begun goes on by itself."
        return Told(Level.CRITICAL, what, did if report.seen else (), errors, HTTPStatus.SERVICE_UNAVAILABLE)
    if report.given_up:
        return Told(
            Level.CRITICAL, "It took so long that its lease ran out. The next one goes on from there.", did, errors
        )
    if report.brake_held:
        return Told(Level.WARNING, "The brake held: too many queues would go at once, so none did.", did, errors)
    if errors:
        return Told(Level.WARNING, "It is done, and not all went well.", did, errors)
    if report.left_out:
        return Told(Level.WARNING, "It is done, and what came since you were shown it was left alone. Look again.", did)
    return Told(Level.OK, "It is done.", did)


def _queues(number: int) -> str:
    return f"{number:,} queue{'' if number == 1 else 's'}"


def _page(request: HttpRequest, template: str, title: str, told: Told | None = None, **context: Any) -> HttpResponse:
    everywhere = admin.site.each_context(request)
    status = told.status if told else HTTPStatus.OK
    return TemplateResponse(request, template, {**everywhere, "title": title, "told": told, **context}, status=status)
