"""Serializers of channels and notification settings."""

from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.api.fields import HexUUIDField
from accounts.models import Owner
from notifications.channels import MAX_NAME_LENGTH, MAX_URL_LENGTH
from notifications.models import Channel
from notifications.mutes import TOPICS

CHANNEL = {
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
    "name": "the team's chat",
    "service": "Webhook at chat.example.org",
    "created": "2026-01-05T09:00:00Z",
    "last_sent_at": None,
    "last_error": "",
}


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A webhook",
            CHANNEL,
            response_only=True,
        )
    ]
)
class ChannelSerializer(serializers.ModelSerializer[Channel]):
    """A destination of your notifications besides e-mail. Its address is a secret, and not shown again."""

    uuid = HexUUIDField()

    class Meta:
        model = Channel
        fields = ["uuid", "name", "service", "created", "last_sent_at", "last_error"]
        read_only_fields = fields


@extend_schema_serializer(
    examples=[
        OpenApiExample("A webhook", {**CHANNEL, "secret": "9f2c5b7ef0a14c5f9e0a4f6b6f7c8d9e"}, response_only=True)
    ]
)
class MadeChannelSerializer(ChannelSerializer):
    """A channel that was just created."""

    secret = serializers.CharField(help_text="The key that signs messages to a webhook; empty for other channels.")

    class Meta(ChannelSerializer.Meta):
        fields = [*ChannelSerializer.Meta.fields, "secret"]


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A webhook",
            {"name": "the team's chat", "url": "https://chat.example.org/hooks/3kd8fj2"},
            request_only=True,
        )
    ]
)
class NewChannelSerializer(serializers.Serializer[Any]):
    """A new channel."""

    name = serializers.CharField(max_length=MAX_NAME_LENGTH)
    url = serializers.CharField(
        write_only=True,
        max_length=MAX_URL_LENGTH,
        help_text="The https address of a webhook, or an address for apprise.",
    )


MAX_MUTES = 1000
"""More than the topics of all channels that an owner may have."""


class MuteSerializer(serializers.Serializer[Any]):
    """A topic that you don't get in a channel."""

    topic = serializers.ChoiceField(choices=list(TOPICS))
    channel = serializers.CharField(max_length=32, help_text="`email`, or the UUID of one of your channels.")


@extend_schema_serializer(
    examples=[
        OpenApiExample("No warnings by mail", {"muted": [{"topic": "length", "channel": "email"}]}),
    ]
)
class MutesSerializer(serializers.Serializer[Any]):
    """The notifications about a Pulse user's queues that you don't get."""

    muted = serializers.ListField(child=MuteSerializer(), max_length=MAX_MUTES)


@extend_schema_field({"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$", "nullable": True, "example": "22:00"})
class TimeOfDayField(serializers.TimeField):
    """A time of day, in hours and minutes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(format="%H:%M", input_formats=["%H:%M"], allow_null=True, required=False, **kwargs)


class PreferencesSerializer(serializers.ModelSerializer[Owner]):
    """Your notification settings."""

    quiet_from = TimeOfDayField(
        help_text="The start of the quiet hours; null, with quiet_until null too: no quiet hours."
    )
    quiet_until = TimeOfDayField(help_text="The end of the quiet hours, when deferred notifications are sent.")
    time_zone = serializers.CharField(max_length=64, required=False, help_text="Such as Europe/Berlin.")

    class Meta:
        model = Owner
        fields = ["quiet_from", "quiet_until", "time_zone", "weekly_summary"]
