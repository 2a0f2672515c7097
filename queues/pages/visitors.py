"""Views for owners with access."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django_htmx.http import HttpResponseClientRefresh
from django_htmx.middleware import HtmxDetails

from accounts.pages.common import OwnersRequest

View = Callable[..., HttpResponse]


class Request(OwnersRequest):
    htmx: HtmxDetails


def signed_in(view: View) -> View:
    """Require sign-in. An htmx request without it reloads the whole page, which redirects to the sign-in."""
    required = login_required(view)

    @wraps(view)
    def decorated(request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.htmx and not request.user.is_authenticated:
            return HttpResponseClientRefresh()
        return required(request, *args, **kwargs)

    return decorated
