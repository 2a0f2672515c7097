"""Serializers of offerings and their events."""

from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers

from accounts.api.fields import HexURLField, HexUUIDField
from accounts.models import Owner
from agents.api.serializers import OFFERING, SITE, UUID, ObjectTypeField, StrictUUIDField
from agents.models import Offering

THE_OFFERING = {
    "uuid": OFFERING,
    "url": f"{SITE}/offerings/{OFFERING}/",
    "name": "Cluster",
    "may_subscribe": True,
    "may_publish": False,
    "members": None,
    "publishers": None,
}


@extend_schema_serializer(examples=[OpenApiExample("An offering", THE_OFFERING, response_only=True)])
class OfferingSerializer(serializers.ModelSerializer[Offering]):
    """An offering."""

    uuid = HexUUIDField()
    url = HexURLField("api-offering-detail")
    may_subscribe = serializers.BooleanField(
        read_only=True, help_text="Whether your agents may subscribe to its events."
    )
    may_publish = serializers.BooleanField(read_only=True, help_text="Whether you may publish its events.")
    members = serializers.SerializerMethodField(
        help_text="E-mail addresses of owners whose agents may subscribe. Null unless you are an operator."
    )
    publishers = serializers.SerializerMethodField(
        help_text="E-mail addresses of owners who may publish. Null unless you are an operator."
    )

    class Meta:
        model = Offering
        fields = ["uuid", "url", "name", "may_subscribe", "may_publish", "members", "publishers"]
        read_only_fields = fields

    def get_members(self, offering: Offering) -> list[str] | None:
        return _addresses(offering.members.all()) if self.context["request"].user.is_staff else None

    def get_publishers(self, offering: Offering) -> list[str] | None:
        return _addresses(offering.publishers.all()) if self.context["request"].user.is_staff else None


def _addresses(owners: Any) -> list[str]:
    """Return the sorted addresses. Sorting in the database would ignore the prefetched rows."""
    people: list[Owner] = list(owners)
    return sorted(owner.email for owner in people)


@extend_schema_serializer(
    examples=[OpenApiExample("An order", {"object_type": "order", "payload": {"order_uuid": UUID}}, request_only=True)]
)
class NewEventSerializer(serializers.Serializer[Any]):
    """A new event."""

    object_type = ObjectTypeField()
    payload = serializers.DictField(
        help_text="A JSON object. object_type, offering_uuid and schema_version are added at its top level."
    )
    message_id = StrictUUIDField(
        required=False, help_text="To repeat a request with an unknown outcome, its message id. Default: a new id."
    )


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "An order",
            {"message_id": str(UUID), "delivered": 2, "skipped": 0, "rejected": 0, "unreachable": 0, "gone": 0},
            response_only=True,
        )
    ]
)
class PublishedSerializer(serializers.Serializer[Any]):
    """The result of publishing an event, in numbers of queues."""

    message_id = serializers.CharField(help_text="By which agents recognize duplicates.")
    delivered = serializers.IntegerField(help_text="Queues that got the event.")
    skipped = serializers.IntegerField(help_text="Queues that are not ready, or whose owner may no longer subscribe.")
    rejected = serializers.IntegerField(help_text="Full queues. The event is in the dead-letter queue.")
    unreachable = serializers.IntegerField(
        help_text="Queues whose node is down, or whose virtual host is full. They don't have the event."
    )
    gone = serializers.IntegerField(help_text="Queues that the broker has lost.")
