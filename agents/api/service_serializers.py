"""Serializers of agents' services and processors. Released agents read these fields: do not change them."""

from rest_framework import serializers

from accounts.api.fields import HexURLField, HexUUIDField
from agents.models import AgentProcessor, AgentService


class NestedProcessorSerializer(serializers.ModelSerializer[AgentProcessor]):
    """A processor within its service."""

    uuid = HexUUIDField()
    url = HexURLField("api-agent-processor-detail")

    class Meta:
        model = AgentProcessor
        fields = ["uuid", "url", "name", "backend_type", "backend_version", "last_run", "created", "modified"]
        read_only_fields = fields


class ProcessorSerializer(NestedProcessorSerializer):
    """A processor of an agent's service."""

    service = HexUUIDField(source="service.uuid")
    service_name = serializers.CharField(source="service.name")

    class Meta(NestedProcessorSerializer.Meta):
        fields = ["service", "service_name", *NestedProcessorSerializer.Meta.fields]
        read_only_fields = fields


class NestedServiceSerializer(serializers.ModelSerializer[AgentService]):
    """A service within its agent's identity."""

    uuid = HexUUIDField()
    url = HexURLField("api-agent-service-detail")
    processors = NestedProcessorSerializer(many=True)

    class Meta:
        model = AgentService
        fields = ["uuid", "url", "name", "mode", "state", "statistics", "processors", "created", "modified"]
        read_only_fields = fields


class ServiceSerializer(NestedServiceSerializer):
    """A service of an agent."""

    identity = HexUUIDField(source="identity.uuid")
    identity_name = serializers.CharField(source="identity.name")

    class Meta(NestedServiceSerializer.Meta):
        fields = ["identity", "identity_name", *NestedServiceSerializer.Meta.fields]
        read_only_fields = fields
