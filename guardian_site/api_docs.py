"""The REST API's schema as a file, and as a page of Swagger UI."""

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


class SchemaView(SpectacularAPIView):
    """The schema in YAML or JSON."""

    schema = None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:
        """Return the schema. It contains no secret, so everybody may read it."""
        renderer: Any = request.accepted_renderer
        named = {"Content-Disposition": f'inline; filename="Guardian.{renderer.format}"'}
        kind = renderer.media_type
        return HttpResponse(_rendered(kind), content_type=f"{kind}; charset=utf-8", headers=named)

    def handle_exception(self, exc: Exception) -> Response:
        """Return errors in JSON, whatever format the client requested."""
        self.request.accepted_renderer = JSONRenderer()
        self.request.accepted_media_type = JSONRenderer.media_type
        return super().handle_exception(exc)


@cache
def _rendered(kind: str) -> bytes:
    renderer = next(one for one in SchemaView.renderer_classes if one.media_type == kind)
    rendered: Any = renderer().render(schema(), renderer_context={})
    return bytes(rendered)


@cache
def schema() -> dict[str, Any]:
    """Return the schema. It is cached, because it depends on the code alone."""
    generated: dict[str, Any] = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    return generated


page = require_safe(
    csp_update({"img-src": ["data:"]})(  # the icons in Swagger UI's stylesheet
        SpectacularSwaggerSplitView.as_view(
            url_name="api-schema", template_name="api/docs.html", authentication_classes=[SessionAuthentication]
        )
    )
)
"""Show the schema as a page. It contains no secret, so everybody may read it."""
