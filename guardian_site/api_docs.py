"""The REST API's schema: for programs, and as a page of Swagger UI."""

from functools import cache
from typing import Any

from csp.decorators import csp_update
from django.http import HttpResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.authentication import SessionAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response


class Schema(SpectacularAPIView):
    """The schema for programs, in YAML or JSON."""

    schema = None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show it. Everybody may read it: there is no secret in it."""
        renderer: Any = request.accepted_renderer
        named = {"Content-Disposition": f'inline; filename="Guardian.{renderer.format}"'}
        kind = renderer.media_type
        return HttpResponse(_rendered(kind), content_type=f"{kind}; charset=utf-8", headers=named)

    def handle_exception(self, exc: Exception) -> Response:
        """Tell what went wrong in JSON, whatever form the schema was asked for in."""
        self.request.accepted_renderer = JSONRenderer()
        self.request.accepted_media_type = JSONRenderer.media_type
        return super().handle_exception(exc)


@cache
def _rendered(kind: str) -> bytes:
    renderer = next(one for one in Schema.renderer_classes if one.media_type == kind)
    rendered: Any = renderer().render(schema(), renderer_context={})
    return bytes(rendered)


@cache
def schema() -> dict[str, Any]:
    """Return the schema, which is what the code says: it doesn't change while it runs."""
    described: dict[str, Any] = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    return described


page = require_safe(
    csp_update({"img-src": ["data:"]})(  # the icons in Swagger UI's stylesheet
        SpectacularSwaggerSplitView.as_view(
            url_name="api-schema", template_name="api/docs.html", authentication_classes=[SessionAuthentication]
        )
    )
)
"""Show the schema to people. Everybody may read it: there is no secret in it."""
