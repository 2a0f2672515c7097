"""The documents under /help/, and the links that lead there."""

import re
from html.parser import HTMLParser

import pytest
from django.conf import settings
from playwright.sync_api import Page, expect

from guardian_site import context, help_pages
from guardian_site.markdown import anchor, to_html
from tests.support.chromium import violations

TEMPLATES = [path.read_text() for path in (settings.BASE_DIR / "templates").rglob("*.html")]


class Parsed(HTMLParser):
    """The anchors and the targets of links and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given["id"]} if "id" in given else set()
        self.targets |= {given[name] for name in ("href", "src") if name in given}


@pytest.fixture(scope="module")
def documents():
    parsed = {}
    for name in help_pages.DOCUMENTS:
        _, html = help_pages.rendered(name)
        parsed["/help/" if name == help_pages.INDEX else f"/help/{name}/"] = Parsed(html)
    return parsed


def test_every_link_between_documents_leads_to_a_page_and_an_anchor(documents, client, db):
    wrong = []
    for path, document in documents.items():
        for target in document.targets:
            page, _, fragment = target.partition("#")
            page = page or path
            if page.startswith("https://") or page.startswith("http://127.0.0.1"):
                continue
            if page in documents:
                found = not fragment or fragment in documents[page].anchors
            else:
                found = client.get(page).status_code == 200
            if not found:
                wrong.append(f"{path}: {target}")
    assert wrong == []


def test_every_section_of_the_site_and_every_template_links_to_an_existing_anchor(documents):
    linked = {f"/help/{target}" for target in context.HELP.values()}
    for template in TEMPLATES:
        for name, fragment in re.findall(r"{% url 'help_document' '([\w-]+)' %}(#[\w-]+)?", template):
            linked.add(f"/help/{name}/{fragment}")
    for target in linked:
        page, _, fragment = target.partition("#")
        assert not fragment or fragment in documents[page].anchors, target


def test_a_document_has_its_title_and_no_inline_code(client, db):
    page = client.get("/help/owners/")
    assert "<title>For owners · Guardian</title>" in page.text
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", page.text)


def test_an_example_is_plain_text(client, db):
    answer = client.get("/help/examples/shop.py")
    assert (answer.status_code, answer["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert answer.content == (help_pages.DOCS / "examples" / "shop.py").read_bytes()


@pytest.mark.django_db(transaction=True)
def test_wide_tables_of_a_document_are_accessible(page: Page):
    """Other documents are among the pages of test_walk.py."""
    assert list(violations(page, "/help/comparison/")) == []


@pytest.mark.django_db(transaction=True)
def test_a_document_shows_its_pictures(page: Page):
    page.goto("/help/owners/")
    pictures = page.locator("article img")
    assert pictures.count() > 2
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        expect(picture).to_have_js_property("complete", True)
        assert picture.evaluate("image => image.naturalWidth") > 100


# Markdown


def test_html_and_script_addresses_in_markdown_are_text():
    html = to_html("<script>alert(1)</script>\n\n[a link](javascript:alert(1))")
    assert "<script" not in html
    assert "<a" not in html


def test_right_aligned_columns_get_a_class_instead_of_a_style():
    html = to_html("| name | messages |\n| --- | ---: |\n| a | 1 |")
    assert '<td class="number" data-label="messages">1</td>' in html
    assert "style" not in html


@pytest.mark.parametrize(
    ("heading", "expected"),
    [("What the mails mean", "what-the-mails-mean"), ("The broker can't be queried", "the-broker-cant-be-queried")],
)
def test_anchors_are_those_of_github(heading, expected):
    assert anchor(heading) == expected
