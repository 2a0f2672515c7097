"""A real browser. A test fails if a page violates the CSP, logs an error, or sends a request to another host."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

from accounts.models import Owner
from accounts.signing_in.links import create_link

# Playwright runs an event loop in this thread, in which Django otherwise refuses to use the database.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NARROW_AND_WIDE: tuple[tuple[int, Literal["light", "dark"]], ...] = ((360, "light"), (1600, "dark"))
LOADED = {"stylesheet", "image", "font", "script", "other"}
LOG_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`violated: ${event.effectiveDirective} by ${event.blockedURI} on ${event.documentURI}`);
});
"""
# Not the passed rules: with them the result of a page is much larger.
RUN_AXE = "() => axe.run({resultTypes: ['violations']}).then((result) => result.violations)"
SIZES = """() => ["navigation", "resource"].flatMap((type) => performance.getEntriesByType(type))
  .map((entry) => entry.encodedBodySize)"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium once."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def other_hosts() -> set[str]:
    """Return the hosts, such as "localhost:1234", that pages may use beside the live server. Tests add to it."""
    return set()


@contextmanager
def checked_page(browser: Browser, url: str, other_hosts: set[str]) -> Iterator[Page]:
    """Yield a page of a new browser context on this server. Fail if it loads or logs something that it should not.

    The page itself may be an error, but all that it loads must exist. Pages of other hosts are not checked.
    """
    wrong: list[str] = []

    def is_ours(request: Request) -> bool:
        return request.is_navigation_request() or request.frame.url.startswith(url)

    def on_console(message: ConsoleMessage) -> None:
        missing = message.text.startswith("Failed to load resource: the server responded")
        is_wrong = (message.type == "error" and not missing) or "Content Security Policy" in message.text
        if is_wrong and message.page is not None and message.page.url.startswith(url):
            wrong.append(f"console: {message.text}")

    def on_request(request: Request) -> None:
        host = urlsplit(request.url)
        if (
            host.scheme.startswith("http")
            and is_ours(request)
            and host.netloc not in {urlsplit(url).netloc, *other_hosts}
        ):
            wrong.append(f"another host: {request.url}")

    def on_response(response: Response) -> None:
        if response.status >= 400 and is_ours(response.request) and response.request.resource_type in LOADED:
            wrong.append(f"{response.status}: {response.url}")

    def on_request_failed(request: Request) -> None:
        if is_ours(request) and request.failure != "net::ERR_ABORTED":  # as when navigating away while the page loads
            wrong.append(f"{request.failure}: {request.url}")

    context = browser.new_context(base_url=url, locale="en-GB")
    context.set_default_timeout(10_000)
    context.add_init_script(LOG_VIOLATIONS)
    context.on("console", on_console)
    context.on("weberror", lambda error: wrong.append(f"script: {error.error}"))
    context.on("request", on_request)
    context.on("response", on_response)
    context.on("requestfailed", on_request_failed)
    yield context.new_page()
    context.close()
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def page(browser: Browser, live_server: Any, other_hosts: set[str]) -> Iterator[Page]:
    """Return a page on the live server, for paths like ``page.goto("/queues/")``."""
    with checked_page(browser, live_server.url, other_hosts) as opened:
        yield opened


def sizes_of_all_loaded(page: Page) -> list[int]:
    """Return the bytes of the open page and of each file that it loaded, as sent."""
    sizes: list[int] = page.evaluate(SIZES)
    return sizes


def violations(page: Page, address: str) -> Iterator[str]:
    """Yield the violations that axe-core finds on a page, narrow and light, then wide and dark, and if it overflows."""
    page.goto(address)
    page.evaluate(Axe().axe_script)
    for width, scheme in NARROW_AND_WIDE:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        # Wait for the animated colours of Django's admin.
        page.evaluate("() => Promise.all(document.getAnimations().map((animation) => animation.finished))")
        for one in page.evaluate(RUN_AXE):
            for node in one["nodes"]:
                yield f"{address}, {width}, {scheme}: {one['help']}: {node['html'][:150]}"
        if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
            yield f"{address}: {wide} wide on {width}"


def sign_in(page: Page, owner: Owner) -> None:
    """Sign the owner in on this page by a link."""
    page.goto(urlsplit(create_link(owner)).path)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(re.compile("//[^/]+/$"))
