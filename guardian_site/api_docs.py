"""The REST API's schema as a file, and as pages."""

from functools import cache
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from guardian_site.api_calls import Reference


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


@cache
def reference() -> Reference:
    """Return the calls and objects of the schema. They are cached like it."""
    return Reference(schema())


@require_safe
def start(request: HttpRequest) -> HttpResponse:
    """Show how to call the API, and its resources. The pages contain no secret, so everybody may read them."""
    return render(request, "api/start.html", {"resources": reference().resources})


@gzip_page
@require_safe
def resource(request: HttpRequest, tag: str) -> HttpResponse:
    """Show each call of a resource, and let the reader try it."""
    found = reference().resources.get(tag)
    if found is None:
        raise Http404
    calls = [(call, call.curl(settings.GUARDIAN_BASE_URL)) for call in found.calls]
    can_be_tried = any(call.can_be_tried for call in found.calls)
    shown = {"name": tag, "calls": calls, "objects": found.objects, "can_be_tried": can_be_tried}
    return render(request, "api/resource.html", shown)
