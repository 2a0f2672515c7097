"""How operators remove unused identities and services of agents through the API."""

from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from rest_framework import serializers
from rest_framework.response import Response

from accounts.api.fields import HexUUIDField
from accounts.api.views import Request
from accounts.pulse_users.validation import require_operator
from agents.services import unused
from core.endpoints import read

MAX_HOURS = 10 * 365 * 24


class CleanUpSerializer(serializers.Serializer[Any]):
    """What to remove."""

    dry_run = serializers.BooleanField(default=True, help_text="Whether to return what would be removed, and keep it.")
    older_than_hours = serializers.IntegerField(default=24, min_value=0, max_value=MAX_HOURS)


class UnusedIdentitySerializer(serializers.Serializer[Any]):
    """An identity without subscription, consumer and service."""

    uuid = HexUUIDField()
    name = serializers.CharField()
    offering__name = serializers.CharField(source="offering.name")  # as released clients read it
    created = serializers.DateTimeField()
    modified = serializers.DateTimeField()


class UnusedServiceSerializer(serializers.Serializer[Any]):
    """A service that has not reported for long."""

    uuid = HexUUIDField()
    name = serializers.CharField()
    identity__name = serializers.CharField(source="identity.name")
    state = serializers.CharField()
    modified = serializers.DateTimeField()


class CleanedUpSerializer(serializers.Serializer[Any]):
    """The number of removed rows, or of those that would be removed."""

    deleted_count = serializers.IntegerField()
    dry_run = serializers.BooleanField()


class CleanedUpIdentitiesSerializer(CleanedUpSerializer):
    """The removed identities, or those that would be removed."""

    items = UnusedIdentitySerializer(many=True)


class CleanedUpServicesSerializer(CleanedUpSerializer):
    """The removed services, or those that would be removed."""

    items = UnusedServiceSerializer(many=True)


def clean_up(request: Request, rows: QuerySet[Any], answer: type[CleanedUpSerializer]) -> Response:
    """Remove those of these rows that were not changed for long, for an operator, or return what would be removed."""
    require_operator(request.user)
    body = read(CleanUpSerializer, request)
    before = timezone.now() - timedelta(hours=body["older_than_hours"])
    found = unused.remove(rows, before, dry_run=body["dry_run"])
    return Response(answer({"deleted_count": len(found), "dry_run": body["dry_run"], "items": found}).data)
