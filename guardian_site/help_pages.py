"""The pages under ``/help/``: the documents in ``docs/``. They contain no secret, so everybody may read them."""

from functools import cache

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from guardian_site.markdown import to_html

DOCS = settings.BASE_DIR / "docs"
INDEX = "README"
DOCUMENTS = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
EXAMPLES = {path.name: path for path in sorted((DOCS / "examples").glob("*.*"))}


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return _shown(request, INDEX)


@require_safe
def document(request: HttpRequest, name: str) -> HttpResponse:
    if name not in DOCUMENTS:
        raise Http404
    return _shown(request, name)


@require_safe
def example(request: HttpRequest, name: str) -> HttpResponse:
    """Return the text of an example: a program, or a JSON schema."""
    if name not in EXAMPLES:
        raise Http404
    return HttpResponse(EXAMPLES[name].read_text(), content_type="text/plain; charset=utf-8")


def _shown(request: HttpRequest, name: str) -> HttpResponse:
    title, content = rendered(name)
    return render(request, "help.html", {"title": title, "content": content, "is_index": name == INDEX})


@cache
def rendered(name: str) -> tuple[str, SafeString]:
    text = DOCUMENTS[name].read_text()
    heading = text.partition("\n")[0]
    return heading.removeprefix("# "), to_html(text, address)


def address(target: str) -> str:
    """Return the address under ``/help/`` of a link's target in a document."""
    path, hash_, anchor = target.partition("#")
    if not path or "://" in path:
        return target
    folder, _, name = path.rpartition("/")
    if folder == "pictures":
        return static(f"help/{name}")
    if folder == "examples":
        return reverse("help_example", args=[name])
    return reverse("help_document", args=[name.removesuffix(".md")]) + hash_ + anchor
