"""What agents report and ask besides registering queues: their services, and who they are."""

import json
from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.response import Response

from accounts.api.fields import HexUUIDField
from accounts.api.views import Request
from accounts.models import Owner
from agents.api.serializers import MAX_NAME_LENGTH, MAX_VERSION_LENGTH, VerbatimField
from agents.api.service_filters import ProcessorFilter, ServiceFilter
from agents.api.service_serializers import ProcessorSerializer, ServiceSerializer
from agents.api.unused import CleanedUpServicesSerializer, CleanUpSerializer, clean_up
from agents.api.views import ByUUID, require_own
from agents.models import AgentProcessor, AgentService
from agents.services import services
from core.endpoints import StrictParameters, read, takes
from core.links import absolute_url

MAX_STATISTICS_BYTES = 64 * 1024


class NewProcessorSerializer(serializers.Serializer[Any]):
    """A processor, by its name."""

    name = VerbatimField(max_length=MAX_NAME_LENGTH)
    backend_type = VerbatimField(max_length=100)
    backend_version = VerbatimField(max_length=MAX_VERSION_LENGTH, required=False, allow_null=True, allow_blank=True)


class StatisticsSerializer(serializers.Serializer[Any]):
    """Statistics of a service."""

    statistics = serializers.DictField(help_text=f"At most {MAX_STATISTICS_BYTES} bytes of JSON.")

    def validate_statistics(self, statistics: dict[str, Any]) -> dict[str, Any]:
        encoded = json.dumps(statistics)
        if len(encoded) > MAX_STATISTICS_BYTES:
            raise serializers.ValidationError(f"Send at most {MAX_STATISTICS_BYTES} bytes of JSON.")
        if "\\u0000" in encoded:
            raise serializers.ValidationError("Remove the NUL character.")
        return statistics


class AgentServices(ByUUID[AgentService]):
    """Services of agents: those of your own; for operators, all."""

    serializer_class = ServiceSerializer
    filterset_class = ServiceFilter

    def get_queryset(self) -> QuerySet[AgentService]:
        rows = AgentService.objects.seen_by(self.request.user)
        return rows.select_related("identity__owner").prefetch_related("processors")

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete a service, with its processors."""
        self.get_object().delete()
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=NewProcessorSerializer, responses={201: ProcessorSerializer, 200: ProcessorSerializer})
    @action(detail=True, methods=["post"])
    def register_processor(self, request: Request, uuid: str) -> Response:
        """Register a processor of a service, or say that it runs. 201: it is new."""
        service = self.get_object()
        require_own(service.identity, request)
        body = read(NewProcessorSerializer, request)
        row, new = services.register_processor(
            service, body["name"], body["backend_type"], body.get("backend_version") or ""
        )
        data = ProcessorSerializer(row, context=self.get_serializer_context()).data
        return Response(data, HTTPStatus.CREATED if new else HTTPStatus.OK)

    @extend_schema(request=StatisticsSerializer, responses=ServiceSerializer)
    @action(detail=True, methods=["post"])
    def set_statistics(self, request: Request, uuid: str) -> Response:
        """Replace the statistics of a service."""
        service = self.get_object()
        require_own(service.identity, request)
        services.set_statistics(service, read(StatisticsSerializer, request)["statistics"])
        return Response(self.get_serializer(service).data)

    @extend_schema(request=CleanUpSerializer, responses=CleanedUpServicesSerializer, filters=False)
    @action(detail=False, methods=["post"], pagination_class=None)
    def cleanup_stale(self, request: Request) -> Response:
        """Remove services whose last report is old, with their processors.

        For operators. By default nothing is removed: the response lists what would be.
        """
        return clean_up(request, AgentService.objects.select_related("identity"), CleanedUpServicesSerializer)


class AgentProcessors(ByUUID[AgentProcessor]):
    """Processors of agents' services: those of your own; for operators, all."""

    serializer_class = ProcessorSerializer
    filterset_class = ProcessorFilter

    def get_queryset(self) -> QuerySet[AgentProcessor]:
        return AgentProcessor.objects.seen_by(self.request.user).select_related("service")

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, uuid: str) -> Response:
        """Delete a processor."""
        self.get_object().delete()
        return Response(status=HTTPStatus.NO_CONTENT)


class UserSerializer(serializers.ModelSerializer[Owner]):
    """The user of the token, with the fields that agents read."""

    uuid = HexUUIDField()
    url = serializers.SerializerMethodField(help_text="The URL of this endpoint.")
    username = serializers.CharField(source="email")
    permissions = serializers.SerializerMethodField(help_text="Always empty: Guardian has no such roles.")

    class Meta:
        model = Owner
        fields = [
            "uuid", "url", "username", "email", "full_name", "is_staff", "is_active", "date_joined", "permissions",
        ]  # fmt: skip
        read_only_fields = fields

    def get_url(self, owner: Owner) -> str:
        return absolute_url("/api/users/me/")

    def get_permissions(self, owner: Owner) -> list[str]:
        return []


class UserMe(StrictParameters):
    """The user of the token."""

    @extend_schema(responses=UserSerializer)
    @takes(OpenApiParameter("field", str, many=True, description="Only these fields."))
    def get(self, request: Request) -> Response:
        """Show who you are, as agents ask it. `me/` shows more."""
        data = UserSerializer(request.user).data
        wanted = request.query_params.getlist("field")
        return Response({name: data[name] for name in data if name in wanted} if wanted else data)
