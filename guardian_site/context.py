"""The context of all pages: the navigation, and how to sign in."""

from typing import Any, NamedTuple

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject

from accounts.access import vouching
from message_store.pages.views import has_something_to_see

HELP = {
    "signin": "owners/#signing-in",
    "vouching": "owners/#signing-in",
    "pulse-users": "owners/#your-pulse-users-on-rabbitmq",
    "queues": "owners/#your-queues",
    "exchanges": "owners/#your-queues",
    "archives": "archives/",
    "agents": "agents/",
    "message-store": "message-store/",
    "tokens": "owners/#the-rest-api",
    "settings": "owners/#notifications",
    "owners": "operators/#people",
}
"""The page under ``/help/`` about each section of the site."""


class Entry(NamedTuple):
    """An entry of the navigation. ``section`` is the first part of the paths of its pages."""

    section: str
    words: str
    url: str


class Group(NamedTuple):
    """Entries of the navigation under a heading, which may be empty."""

    words: str
    entries: list[Entry]


def navigation(request: HttpRequest) -> dict[str, Any]:
    section = request.path.split("/")[1]
    # Lazy: what is not a page needs no navigation, and the request of a missing static file has no user.
    groups = SimpleLazyObject(lambda: _groups(request, section))
    return {
        "oidc_name": settings.OIDC_NAME if settings.OIDC_ISSUER else "",
        "navigation": groups,
        "here": SimpleLazyObject(
            lambda: next((one for group in groups for one in group.entries if one.section == section), "")
        ),
    }


def _groups(request: HttpRequest, section: str) -> list[Group]:
    user = getattr(request, "user", None)
    guide = Entry("help", "Help", reverse("help") + HELP.get(section, ""))
    if user is None or not user.is_authenticated:
        return [Group("", [_entry("signin", "Sign in", "account_login"), guide])]
    applications = [_entry("message-store", "Applications", "message_store")] if has_something_to_see(user) else []
    operators = [
        *([_entry("admin", "Administration", "admin:index")] if user.is_staff else []),
        *([_entry("owners", "Owners", "owners")] if vouching.may_vouch(user) else []),
    ]
    return [
        Group("", [_entry("", "Home", "home")]),
        Group(
            "",
            [
                _entry("queues", "Queues", "queues"),
                _entry("archives", "Archives", "archives"),
                _entry("exchanges", "Exchanges", "exchanges"),
            ],
        ),
        Group(
            "",
            [
                _entry("pulse-users", "Pulse users", "pulse_users"),
                _entry("agents", "Agents", "agents"),
                *applications,
            ],
        ),
        Group("", [_entry("tokens", "Tokens", "tokens"), _entry("settings", "Settings", "settings"), guide]),
        *([Group("Operators", operators)] if operators else []),
    ]


def _entry(section: str, words: str, name: str) -> Entry:
    return Entry(section, words, reverse(name))
