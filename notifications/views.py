from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from accounts.access import quotas
from accounts.access.vouching import NotVouched, may_use_broker
from accounts.models import PulseUser
from accounts.pages.common import OwnersRequest, add_error, page_with_forms
from core.time_zones import time_zones
from notifications import channels, mutes, preferences
from notifications.audience import EMAIL
from notifications.forms import ChannelForm, QuietHoursForm, WeeklyForm
from notifications.models import Channel


@login_required
@page_with_forms
def settings_page(request: OwnersRequest) -> HttpResponse:
    """Show and change the notification settings. The pressed button selects the form."""
    if request.method != "POST":
        return _settings(request)
    if "weekly" in request.POST:
        return _set_weekly_summary(request)
    if "quiet" in request.POST:
        return _set_quiet_hours(request)
    return _add_channel(request)


@login_required
@page_with_forms
def mutes_page(request: OwnersRequest, username: str) -> HttpResponse:
    """Let an owner choose which notifications about a Pulse user's queues they get, and in which channels."""
    pulse_user = get_object_or_404(PulseUser.objects.filter(owners=request.user), username=username)
    channels_of = [(EMAIL, "Mail"), *((one.uuid.hex, one.name) for one in request.user.channels.all())]
    every = {(topic, channel) for topic in mutes.TOPICS for channel, _ in channels_of}
    if request.method == "POST":
        wanted = [] if "nothing" in request.POST else request.POST.getlist("wanted")
        mutes.set_muted(request.user, pulse_user, every - {split_choice(one) for one in wanted})
        messages.success(request, f"Your notifications about {pulse_user} are saved.")
        return redirect("pulse_user", username)
    muted = mutes.muted(request.user, pulse_user)
    rows = [
        (label, [(channel, name, f"{topic} {channel}", (topic, channel) not in muted) for channel, name in channels_of])
        for topic, label in mutes.TOPICS.items()
    ]
    return render(
        request,
        "settings/mutes.html",
        {"pulse_user": pulse_user, "channels": [name for _, name in channels_of], "rows": rows},
    )


def split_choice(text: str) -> mutes.Choice:
    topic, _, channel = text.partition(" ")
    return topic, channel


@login_required
@require_POST
def channel_test(request: OwnersRequest, uuid: UUID) -> HttpResponse:
    channel = get_object_or_404(Channel.objects.select_related("owner"), owner=request.user, uuid=uuid)
    try:
        channels.test_channel(channel)
    except channels.ChannelFailed as error:
        messages.error(request, f"The test message to {channel.name} did not arrive: {error}.")
    else:
        messages.success(request, f"The test message to {channel.name} was sent. Check that it arrived.")
    return redirect("settings")


@login_required
@page_with_forms
def channel_delete(request: OwnersRequest, uuid: UUID) -> HttpResponse:
    channel = get_object_or_404(Channel, owner=request.user, uuid=uuid)
    if request.method == "POST":
        channel.delete()
        messages.success(request, f"The channel {channel.name} was deleted.")
        return redirect("settings")
    return render(request, "settings/channel_delete.html", {"channel": channel})


def _add_channel(request: OwnersRequest) -> HttpResponse:
    form = ChannelForm(request.POST)
    if form.is_valid():
        try:
            channel = channels.create_channel(request.user, form.cleaned_data["name"], form.cleaned_data["url"])
        except NotVouched as error:
            return _settings(request, channel_form=form, trouble=str(error), status=403)
        except ValidationError as error:
            add_error(form, error, "name")
        else:
            if secret := channels.secret_of(channel):
                context = {"channel": channel, "secret": secret, "header": channels.SIGNATURE}
                response = render(request, "settings/channel_secret.html", context, status=201)
                response["Cache-Control"] = "no-store"
                return response
            messages.success(request, f"The channel {channel.name} was added. Send a test to check that it works.")
            return redirect("settings")
    return _settings(request, channel_form=form)


def _set_quiet_hours(request: OwnersRequest) -> HttpResponse:
    form = QuietHoursForm(request.POST)
    if form.is_valid():
        wanted = form.cleaned_data
        try:
            preferences.set_quiet_hours(
                request.user, wanted["quiet_from"], wanted["quiet_until"], wanted["time_zone"].strip()
            )
        except ValidationError as error:
            form.add_error(None, error)
        else:
            hours = "Your quiet hours are saved." if wanted["quiet_from"] else "You have no quiet hours."
            messages.success(request, f"{hours} Times are shown in the time zone {request.user.time_zone}.")
            return redirect("settings")
    return _settings(request, quiet_form=form)


def _set_weekly_summary(request: OwnersRequest) -> HttpResponse:
    wanted = request.POST.get("weekly_summary") is not None
    preferences.set_weekly_summary(request.user, wanted)
    messages.success(request, "You get a summary every week." if wanted else "You get no more weekly summaries.")
    return redirect("settings")


def _settings(
    request: OwnersRequest,
    *,
    channel_form: ChannelForm | None = None,
    quiet_form: QuietHoursForm | None = None,
    trouble: str = "",
    status: int = 200,
) -> HttpResponse:
    owner = request.user
    hours = {name: getattr(owner, name) for name in ("quiet_from", "quiet_until", "time_zone")}
    may_have_more = quotas.has_room(quotas.CHANNELS, owner, owner.channels.all())
    return render(
        request,
        "settings/settings.html",
        {
            "pulse_users": owner.pulse_users.order_by("username"),
            "channels": list(owner.channels.all()),
            "may_add": may_use_broker(owner) and may_have_more,
            "is_full": not may_have_more,
            "channel_form": channel_form or ChannelForm(),
            "quiet_form": quiet_form or QuietHoursForm(initial=hours),
            "weekly_form": WeeklyForm(initial={"weekly_summary": owner.weekly_summary}),
            "time_zones": sorted(time_zones()),
            "trouble": trouble,
        },
        status=status,
    )
