"""Pages of exchanges."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from accounts.models import PulseUser
from accounts.pages.common import page_of
from accounts.pages.forms import NameForm
from core.refusals import Refusal
from queues.actions import exchanges, single
from queues.actions.exchanges import OwnExchange
from queues.pages.destroy import describe_failure
from queues.pages.queue import BINDINGS_SHOWN
from queues.pages.visitors import Request, signed_in
from rabbit.errors import BrokerError
from rabbit.names import readable


class ExchangeShown(NamedTuple):
    """A row of the exchanges' page. Each binding is the destination's type, its name and the routing key."""

    exchange: OwnExchange
    name: str
    bindings: list[tuple[str, str, str]]
    more: int


def _exchange_shown(exchange: OwnExchange) -> ExchangeShown:
    shown = [
        (one.destination_type, readable(one.destination), readable(one.routing_key))
        for one in exchange.bindings[:BINDINGS_SHOWN]
    ]
    return ExchangeShown(exchange, readable(exchange.name), shown, max(0, len(exchange.bindings) - BINDINGS_SHOWN))


@signed_in
@require_safe
def exchanges_page(request: Request) -> HttpResponse:
    """Show the visitor's exchanges and their bindings, as they are on the broker now."""
    context: dict[str, Any] = {"pulse_users": PulseUser.objects.seen_by(request.user).exists()}
    try:
        found = exchanges.own_exchanges(request.user)
    except BrokerError as error:
        trouble, status = describe_failure(error, "The exchanges could not be listed", destructive=False)
        return render(request, "exchanges/exchanges.html", {**context, "trouble": trouble}, status=status)
    page = page_of(request, found)
    shown = [_exchange_shown(one) for one in page.object_list]
    return render(request, "exchanges/exchanges.html", {**context, "page": page, "exchanges": shown})


@signed_in
@require_safe
def exchange_page(request: Request) -> HttpResponse:
    """Show one exchange: what it is bound to, and who publishes."""
    name = request.GET.get("name", "")
    context: dict[str, Any] = {"name": readable(name)}
    try:
        exchange = exchanges.own_exchange(request.user, name)
        context |= {"shown": _exchange_shown(exchange), "traffic": exchanges.traffic(exchange)}
    except Refusal as error:
        raise Http404(str(error)) from error
    except BrokerError as error:
        context["trouble"], status = describe_failure(error, "The exchange could not be shown", destructive=False)
        return render(request, "exchanges/exchange.html", context, status=status)
    return render(request, "exchanges/exchange.html", context)


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def exchange_delete(request: Request) -> HttpResponse:
    name = request.GET.get("name", "")
    try:
        exchanges.require_own(request.user, name)
    except Refusal as error:
        raise Http404(str(error)) from error
    form = NameForm(readable(name), request.POST if request.method == "POST" else None)
    context: dict[str, Any] = {"name": readable(name), "form": form}
    try:
        if form.is_valid():
            exchanges.delete_exchange(request.user, name)
            messages.success(request, f"The exchange {readable(name)} was deleted.")
            return redirect("exchanges")
        found = [one for one in exchanges.own_exchanges(request.user) if one.name == name]
    except single.Gone:
        found = []
    except BrokerError as error:
        trouble, status = describe_failure(error, "The exchange was not deleted", destructive=form.is_valid())
        return render(request, "exchanges/delete.html", {**context, "trouble": trouble}, status=status)
    if not found:
        messages.warning(request, f"The exchange {readable(name)} is no longer on the broker.")
        return redirect("exchanges")
    return render(request, "exchanges/delete.html", {**context, "shown": _exchange_shown(found[0])})
