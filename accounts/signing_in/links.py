"""Sign-in by a link that an operator created."""

import hashlib
import secrets
from datetime import timedelta

from allauth.account.utils import perform_login
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from accounts import allauth_private, audit
from accounts.models import Owner, SignInLink
from accounts.signing_in.codes import AccountAdapter
from accounts.signing_in.owners import mark_address_verified

LINK_LIFETIME = timedelta(minutes=10)


def create_link(owner: Owner) -> str:
    """Return a URL that signs the owner in once, within ten minutes. This also verifies the owner's address."""
    token = secrets.token_urlsafe(32)
    SignInLink.objects.create(owner=owner, digest=_digest(token), expires_at=timezone.now() + LINK_LIFETIME)
    audit.record(None, "created a sign-in link", owner)
    mark_address_verified(owner)
    return f"{settings.GUARDIAN_BASE_URL}{reverse('sign_in_link', args=[token])}"


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """Show a button for a valid link. The button's POST signs in the owner and uses the link up.

    A GET changes nothing, because the link previews of chats and mail programs request links.
    """
    link = SignInLink.objects.select_related("owner").filter(digest=_digest(token), expires_at__gt=timezone.now())
    found = link.first()
    if found is not None and request.method != "POST":
        return render(request, "signin/link.html", {"owner": found.owner})
    # Of two concurrent requests, only one deletes the row.
    if found is None or not link.delete()[0]:
        return render(request, "signin/link-used.html", status=410)
    if request.user.is_authenticated:
        AccountAdapter(request).logout(request)
    allauth_private.record_method(request, found.owner, "link")
    response: HttpResponse = perform_login(request, found.owner, email=found.owner.email)
    return response


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
