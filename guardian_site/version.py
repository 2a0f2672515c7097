"""Guardian's version."""

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from core.endpoints import StrictParameters

__version__ = "1.0.0"


class VersionSerializer(serializers.Serializer[dict[str, str]]):
    """Guardian's version."""

    version = serializers.CharField()


class Version(StrictParameters):
    """Guardian's version."""

    @extend_schema(responses=VersionSerializer)
    def get(self, request: Request) -> Response:
        """Show Guardian's version. Agents log it."""
        return Response({"version": __version__})
