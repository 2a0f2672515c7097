"""The REST API of channels and notification settings."""

from http import HTTPStatus

from django.db import transaction
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.api.views import Request
from accounts.models import UNCHANGED, Owner, PulseUser
from core.endpoints import SHOWN_ONCE, StrictParameters, read
from notifications import channels, mutes, preferences
from notifications.audience import EMAIL
from notifications.models import Channel
from notifications.serializers import (
    ChannelSerializer,
    MadeChannelSerializer,
    MutesSerializer,
    NewChannelSerializer,
    PreferencesSerializer,
)


@extend_schema_view(
    list=extend_schema(summary="List your channels, without their addresses"),
    retrieve=extend_schema(summary="Show a channel, without its address"),
)
class Channels(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Channel]):
    """Your channels: destinations of notifications besides e-mail."""

    serializer_class = ChannelSerializer
    lookup_field = "uuid"
    tells_secrets = ("create",)

    def get_queryset(self) -> QuerySet[Channel]:
        """Return the visitor's own channels, for operators too."""
        return Channel.objects.filter(owner=self.request.user.pk)

    @extend_schema(request=NewChannelSerializer, responses={201: MadeChannelSerializer})
    def create(self, request: Request) -> Response:
        """Create a channel.

        Nothing is sent to it yet. The address must use https. It must be public, unless operators allow private ones.
        Messages to a webhook are signed: `secret` is shown in this response only.
        """
        body = read(NewChannelSerializer, request)
        channel = channels.create_channel(request.user, body["name"], body["url"])
        data = {**self.get_serializer(channel).data, "secret": channels.secret_of(channel)}
        return Response(data, HTTPStatus.CREATED, headers=SHOWN_ONCE)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete a channel. Pending notifications to it are not sent."""
        self.get_object().delete()
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=None, responses={204: None, 409: None})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, uuid: str) -> Response:
        """Send a test message to a channel now.

        204: the message was delivered. 409: it was not, and the detail says why.
        """
        channels.test_channel(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)


class Mutes(StrictParameters, GenericViewSet[PulseUser]):
    """What you don't get about the queues of a Pulse user that you own."""

    serializer_class = MutesSerializer
    lookup_field = "username"
    pagination_class = None

    def get_queryset(self) -> QuerySet[PulseUser]:
        """Return the visitor's own Pulse users, for operators too."""
        return PulseUser.objects.seen_by(self.request.user).filter(owners=self.request.user.pk)

    def retrieve(self, request: Request, username: str) -> Response:
        """Show which notifications about a Pulse user's queues you turned off."""
        muted, channels_of = mutes.muted(request.user, self.get_object()), _channels_of(request.user)
        rows = [{"topic": topic, "channel": channel} for topic, channel in sorted(muted) if channel in channels_of]
        return Response({"muted": rows})

    def update(self, request: Request, username: str) -> Response:
        """Choose which notifications about a Pulse user's queues you don't get.

        You get all others by mail and in each of your channels.
        """
        pulse_user = self.get_object()
        choices = {(one["topic"], one["channel"]) for one in read(MutesSerializer, request)["muted"]}
        if unknown := sorted({channel for _, channel in choices} - _channels_of(request.user)):
            raise ValidationError({"muted": [f"You have no channel '{unknown[0]}'. Use `email` or a channel's UUID."]})
        mutes.set_muted(request.user, pulse_user, choices)
        return self.retrieve(request, username)


def _channels_of(owner: Owner) -> set[str]:
    return {EMAIL, *(channel.uuid.hex for channel in owner.channels.all())}


class Preferences(StrictParameters, GenericViewSet[Owner]):
    """Your notification settings: quiet hours, time zone and weekly summary."""

    serializer_class = PreferencesSerializer
    pagination_class = None

    @extend_schema(operation_id="settings_retrieve")
    def retrieve(self, request: Request) -> Response:
        """Show your notification settings."""
        return Response(self.get_serializer(request.user).data)

    @extend_schema(operation_id="settings_change")
    def partial_update(self, request: Request) -> Response:
        """Change your notification settings.

        Fields that you leave out stay unchanged. Either all changes are saved, or none.
        """
        owner = Owner.objects.get(pk=request.user.pk)
        body = self.get_serializer(data=request.data, partial=True)
        body.is_valid(raise_exception=True)
        changes = body.validated_data
        with transaction.atomic():
            if changes.keys() & {"quiet_from", "quiet_until", "time_zone"}:
                names = ("quiet_from", "quiet_until", "time_zone")
                preferences.set_quiet_hours(owner, *(changes.get(name, UNCHANGED) for name in names))
            if "weekly_summary" in changes:
                preferences.set_weekly_summary(owner, changes["weekly_summary"])
        return Response(self.get_serializer(owner).data)
