"""The pages of archives, replays and the messages of live queues, and what other pages say of them."""

import base64
import json
import re
from datetime import UTC, datetime, timedelta

import pika
import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from accounts.models import AuditEntry, PulseUser
from notifications.mails import compose
from notifications.models import Notification
from queues.archives import reading, replay, searching
from queues.guard.once import run_once
from queues.models import Archive, Queue, Replay
from rabbit.decoding import HEADER
from rabbit.fetching import Fetched
from tests.support.archives import store_archive
from tests.support.chromium import sign_in, violations

NAME = "queue/alice/builds"
MARKUP = "<script>alert(1)</script>\u202e"

pytestmark = pytest.mark.usefixtures("pulse_user")


@pytest.fixture
def deleted(guarded, amqp, as_alice, alice, settings):
    """Return the archive of a queue with 20 messages, that a pass deleted."""
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 15
    amqp.queue(NAME, 20)
    run_once()
    run_once()
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 100
    return Archive.objects.get()


def looks():
    """Return the audit trail's entries about messages: what was done, and the details."""
    entries = AuditEntry.objects.filter(event__endswith=" messages").order_by("id")
    return list(entries.values_list("event", "additional_data"))


def test_the_list_shows_what_happened_newest_first(as_alice, alice):
    store_archive(b"1", created=timezone.now() - timedelta(days=1))
    store_archive(b"1", b"2", name=f"queue/alice/{MARKUP}", reason="purged", by=alice)
    page = as_alice.get("/archives/").text
    rows = re.findall(r'class="cut" title="([^"]*)".*?data-label="Messages">(\d+)<', page)
    assert rows == [("queue/alice/&lt;script&gt;alert(1)&lt;/script&gt;\\u202e", "2"), (NAME, "1")]
    assert "alice@example.org purged the queue." in page
    assert "Guardian deleted the queue, because it was over its deletion limit." in page
    assert MARKUP not in page


@pytest.mark.parametrize(
    ("query", "found"),
    [({"search": "build"}, 1), ({"vhost": "other"}, 0), ({"search": "\0"}, None), ({"queue": NAME}, 1),
     ({"page": "9" * 40}, 2)],
)  # fmt: skip
def test_the_list_is_filtered(as_alice, query, found):
    store_archive(b"1")
    store_archive(b"1", name="queue/alice/other")
    page = as_alice.get("/archives/", query)
    assert page.status_code == 200
    if found is not None:
        assert page.text.count('<th scope="row"') == found
    if found == 0:
        assert "No archive matches." in page.text


def page_of(archive, client, part="", **query):
    return client.get(f"/archives/{archive.uuid}/{part}", query)


def test_an_archive_says_what_happened_and_lists_messages_page_by_page(as_alice):
    archive = store_archive(*[b"body %d" % number for number in range(1, 46)], dropped=3, held=2, chunk=10)
    seen, more = [], ""
    while more is not None:
        page = as_alice.get(f"/archives/{archive.uuid}/{more}").text
        seen += re.findall(r">(body \d+)<", page)
        more = found[1] if (found := re.search(r'href="([^"#]*)#messages" rel="next"', page)) else None
    assert seen == [f"body {number}" for number in range(1, 46)]
    for what in ("45 messages", "over its deletion limit", "3 messages past the bounds", "about 2 unacknowledged"):
        assert what in page


def test_looking_at_and_downloading_messages_is_recorded(as_alice):
    archive = store_archive(b"1", b"2")
    page_of(archive, as_alice)
    page_of(archive, as_alice, "messages/2/")
    page_of(archive, as_alice, "messages/2/body/")
    b"".join(page_of(archive, as_alice, "download/"))
    assert [(event, data.get("first"), data.get("count")) for event, data in looks()] == [
        ("viewed messages", 1, 2),
        ("viewed messages", 2, 1),
        ("downloaded messages", 2, 1),
        ("downloaded messages", None, None),
    ]


def test_a_message_is_shown_with_its_properties_and_never_interpreted(as_alice):
    body = json.dumps({"text": MARKUP}).encode()
    properties = {"content_type": MARKUP, "message_id": "m-1"}
    message = Fetched(body, properties, {MARKUP: {"n": 1}}, "exchange/alice/e", MARKUP, True)
    archive = store_archive(b"0", message)
    page = page_of(archive, as_alice, "messages/2/").text
    for what in ("Message 2 of 2", "shown as JSON", "m-1", "exchange/alice/e", "{&quot;n&quot;: 1}"):
        assert what in page
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert f'href="/archives/{archive.uuid}/messages/1/" rel="prev"' in page
    assert 'rel="next"' not in page


def test_the_last_messages_are_listed(as_alice):
    archive = store_archive(*[b"%d" % number for number in range(1, 131)])
    page = page_of(archive, as_alice, last=50).text
    assert "81 to 130 of 130" in page
    assert page.count(">Message ") == 50
    address = f"/api/archives/{archive.uuid.hex}/messages/"
    assert [one["position"] for one in as_alice.get(address, {"last": 2}).json()] == [129, 130]
    assert as_alice.get(address, {"last": 101}).status_code == 400


def searchable():
    """Return an archive of four messages, of which one has no time."""
    at = int(datetime(2026, 1, 5, 3, tzinfo=UTC).timestamp())
    return store_archive(
        Fetched(b"Straw", {"timestamp": at - 1}, {}, "e", "build.done", False),
        Fetched(b"\xffberry", {"timestamp": at}, {}, "e", "build.failed", False),
        Fetched(b"3", {}, {"Attempt": {"n": 17}}, "e", "k", False),
        Fetched(b"cherry", {"timestamp": at + 3600}, {}, "e", "k", False),
    )


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"search": "BUILD"}, [1, 2]),
        ({"search": "erry"}, [2, 4]),
        ({"search": "attempt"}, [3]),
        ({"search": "17"}, [3]),
        ({"search": "erry", "first": 3}, [4]),
        ({"after": "2026-01-05T03:00"}, [2, 4]),
        ({"after": "2026-01-05T03:00", "search": "cherry"}, [4]),
        ({"search": "nothing"}, []),
    ],
)
def test_messages_are_found_by_text_and_time(as_alice, query, found):
    archive = searchable()
    page = page_of(archive, as_alice, **query).text
    assert [int(one) for one in re.findall(r">Message (\d)<", page)] == found
    if "after" in query:
        assert "Messages without it are left out." in page
    answer = as_alice.get(f"/api/archives/{archive.uuid.hex}/messages/", query)
    assert [one["position"] for one in answer.json()] == found
    assert "Link" not in answer.headers


def test_a_search_that_takes_long_is_continued_where_it_ended(as_alice, monkeypatch):
    monkeypatch.setattr(searching, "SECONDS", 0)
    archive = store_archive(b"1", b"2", b"wanted")
    page = page_of(archive, as_alice, search="wanted").text
    assert "No message matches in 1 to 1 of 3." in page
    assert 'href="?search=wanted&amp;first=2#messages" rel="next">Search on' in page
    positions, address = [], f"/api/archives/{archive.uuid.hex}/messages/?search=wanted"
    while address:
        answer = as_alice.get(address)
        positions += [one["position"] for one in answer.json()]
        address = answer.headers.get("Link", "").removeprefix("<").partition(">")[0]
    assert positions == [3]


def test_an_odd_first_message_is_no_error_and_one_that_is_not_there_is_404(as_alice):
    archive = store_archive(b"1", b"2")
    for first in ("0", "-1", "x", "46", "9" * 5_000, "\0"):
        assert page_of(archive, as_alice, first=first).status_code == 200
    for position in (0, 3, 10**30):
        assert page_of(archive, as_alice, f"messages/{position}/").status_code == 404
        assert page_of(archive, as_alice, f"messages/{position}/body/").status_code == 404


def test_a_long_body_is_cut_on_the_page_and_whole_in_the_download(as_alice):
    body = b"<i>" * 1_000_000
    archive = store_archive(body)
    page = page_of(archive, as_alice, "messages/1/")
    assert len(page.content) < 1_000_000
    assert "This is only the beginning of the body." in page.text
    got = page_of(archive, as_alice, "messages/1/body/")
    assert got.getvalue() == body
    assert got["Content-Type"] == "application/octet-stream"
    assert got["X-Content-Type-Options"] == "nosniff"
    assert got["Content-Disposition"].startswith("attachment")


def test_a_page_of_the_api_ends_early_and_leads_to_the_next(as_alice):
    many = {f"h{number}": None for number in range(16_000)}
    long = b"x" * (reading.MAX_BODY_BYTES + 1)
    messages = [Fetched(b"small", {}, {}, "", NAME, False), *[Fetched(b"", {}, many, "", NAME, False)] * 5]
    archive = store_archive(*messages, long, b"last")
    pages, address = [], f"/api/archives/{archive.uuid}/messages/?count=100"
    while address:
        answer = as_alice.get(address)
        pages.append(answer.json())
        address = answer.headers.get("Link", "").removeprefix("<").partition(">")[0]
    found = [message for page in pages for message in page]
    assert [message["position"] for message in found] == [*range(1, 9)]
    assert [len(page) for page in pages] == [2, 1, 1, 1, 3]
    assert {tuple(message["headers"][HEADER]) for message in found[1:6]} == {("headers",)}
    assert [(message["body"], message["encoding"]) for message in found[-2:]] == [(None, "omitted"), ("last", "text")]
    lines = [json.loads(line) for line in page_of(archive, as_alice, "download/").getvalue().splitlines()]
    assert (base64.b64decode(lines[6]["body"]), lines[7]) == (long, found[7])


def test_an_archive_is_deleted_after_confirmation(as_alice):
    archive = store_archive(b"1")
    assert "This can&#x27;t be undone" in page_of(archive, as_alice, "delete/").text.replace("can't", "can&#x27;t")
    assert Archive.objects.exists()
    answer = as_alice.post(f"/archives/{archive.uuid}/delete/", follow=True)
    assert answer.redirect_chain == [("/archives/", 302)]
    assert f"The archive of {NAME} was deleted" in answer.text
    assert not Archive.objects.exists()


def replay_of(archive, **fields):
    return Replay.objects.create(
        **{"archive": archive, "to_queue": NAME, "first": 1, "last": 3, "created": timezone.now(), **fields}
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "The replay starts within some seconds."),
        ({"created": timezone.now() - timedelta(hours=1)}, "Nothing has been sent yet: the broker does not answer"),
        ({"state": "done", "sent": 3, "repeated": 2}, "up to 2 messages may have arrived twice"),
        ({"state": "stopped", "sent": 1}, "Stopped: 1 of 3 messages was sent, and stays where it is."),
        ({"state": "done", "last": 2, "sent": 2}, "first=3&amp;last=3"),
        (
            {"state": "failed", "sent": 1, "error": "Message 2 was not taken: the queue is full."},
            "Failed after 1 of 3 messages: Message 2 was not taken: the queue is full.",
        ),
    ],
)
def test_the_page_of_a_replay_says_how_far_it_is(as_alice, fields, words):
    one = replay_of(store_archive(b"1", b"2", b"3"), **fields)
    page = as_alice.get(f"/archives/{one.archive.uuid}/replays/{one.uuid}/").text
    assert words in " ".join(page.split())
    assert ("Stop the replay" in page) is (one.state == "running")
    assert ("Send the other 2" in page) is (one.state in ("stopped", "failed"))


def test_a_refresh_gets_the_progress_and_reloads_at_the_end(as_alice):
    one = replay_of(store_archive(b"1", b"2", b"3"), sent=1)
    address, htmx = f"/archives/{one.archive.uuid}/replays/{one.uuid}/", {"HX-Request": "true"}
    refreshed = as_alice.get(address, headers=htmx)
    assert refreshed.text.startswith('<progress max="3" value="1"')
    Replay.objects.update(state="done")
    assert as_alice.get(address, headers=htmx).headers["HX-Refresh"] == "true"


def test_a_replay_is_stopped_on_its_page_below_its_archive(as_alice):
    one = replay_of(store_archive(b"1", b"2", b"3"))
    answer = as_alice.post(f"/archives/{one.archive.uuid}/replays/{one.uuid}/stop/", follow=True)
    one.refresh_from_db()
    assert one.state == "stopped"
    assert "The replay is stopped." in answer.text
    other = store_archive(b"1")
    assert as_alice.get(f"/archives/{other.uuid}/replays/{one.uuid}/").status_code == 404


def test_a_deleted_queue_says_first_what_happened_and_offers_its_messages(deleted, as_alice):
    page = as_alice.get(f"/queues/{Queue.objects.get().uuid}/").text
    words = " ".join(re.sub("<[^>]*>", "", page[page.index("<main") :]).split())
    assert re.search(
        r"Guardian deleted this queue (just now|\d+ s ago), because it had 20 messages and its deletion limit was 15\. "
        r"20 messages are kept until",
        words,
    )
    assert f'href="/archives/{deleted.uuid}/restore/">Bring it back' in page
    assert f'href="/archives/{deleted.uuid}/">20 messages' in page


@pytest.mark.parametrize("keep", [True, False])
def test_a_queue_deleted_by_its_owner_names_the_owner(guarded, amqp, as_alice, alice, keep):
    amqp.queue(NAME, 3)
    amqp.channel.queue_bind(NAME, "amq.topic", "build.#")
    run_once()
    answer = as_alice.post(
        f"/queues/{Queue.objects.get().uuid}/delete/", {"typed": NAME, **({"keep": "on"} if keep else {})}, follow=True
    )
    assert "<strong>alice@example.org deleted this queue</strong> " in answer.text
    assert ("3 messages are kept" in answer.text) is keep
    assert ('<code class="name">build.#</code>' in answer.text) is keep
    assert ("There is no archive of its messages" in answer.text) is not keep


def test_a_queue_deleted_without_an_archive_says_why(guarded, amqp, as_alice):
    PulseUser.objects.update(keeps_archives=False)
    amqp.queue(NAME, 20)
    run_once()
    run_once()
    page = as_alice.get(f"/queues/{Queue.objects.get().uuid}/").text
    assert "Messages were not archived, because archives are switched off for it." in page


@pytest.fixture
def live(guarded, amqp, as_alice):
    """Return a queue with three messages."""
    amqp.queue(NAME)
    properties = pika.BasicProperties(content_type=MARKUP)
    for body in ("first", MARKUP, "third"):
        amqp.channel.basic_publish("", NAME, body.encode(), properties)
    run_once()
    return Queue.objects.get()


def test_a_look_at_a_live_queue_says_first_what_it_changes(live, as_alice, amqp):
    assert f"/queues/{live.uuid}/messages/" in as_alice.get(f"/queues/{live.uuid}/").text
    page = as_alice.get(f"/queues/{live.uuid}/messages/").text
    assert "This sets their redelivered flag" in page
    assert "first</code>" not in page
    page = as_alice.post(f"/queues/{live.uuid}/messages/", {"count": 2}).text
    assert page.count("<section") == 2
    assert "first</code>" in page
    assert "third</code>" not in page
    assert "<script>alert" not in page
    assert amqp.ready(NAME) == 3
    method, _, body = amqp.channel.basic_get(NAME)
    assert (body, method.redelivered) == (b"first", True)
    assert [(event, details["count"]) for event, details in looks()] == [("viewed messages", 2)]


@pytest.mark.parametrize("count", ["", "0", "51", "x"])
def test_an_invalid_number_of_messages_has_an_error(live, as_alice, count):
    page = as_alice.post(f"/queues/{live.uuid}/messages/", {"count": count}).text
    assert 'aria-invalid="true"' in page
    assert looks() == []


def test_a_quorum_queue_is_not_looked_into(guarded, amqp, as_alice):
    amqp.queue(NAME, 1, arguments={"x-queue-type": "quorum"})
    run_once()
    queue = Queue.objects.get()
    assert f"/queues/{queue.uuid}/messages/" not in as_alice.get(f"/queues/{queue.uuid}/").text
    for page in (
        as_alice.get(f"/queues/{queue.uuid}/messages/"),
        as_alice.post(f"/queues/{queue.uuid}/messages/", {"count": 1}),
    ):
        assert "You can view the messages of classic queues only. This is a quorum queue." in page.text
        assert "<form method" not in page.text[page.text.index("<h1") :]


def test_an_empty_queue_has_no_messages_to_show(live, as_alice, amqp):
    amqp.channel.queue_purge(NAME)
    assert "no ready messages now" in as_alice.post(f"/queues/{live.uuid}/messages/", {"count": 5}).text
    amqp.channel.queue_delete(NAME)
    assert "no longer on the broker" in as_alice.post(f"/queues/{live.uuid}/messages/", {"count": 5}).text


@pytest.mark.parametrize("page", ["delete", "purge"])
def test_deletion_and_purge_say_what_is_archived_and_offer_nothing_without_archives(live, as_alice, page):
    text = as_alice.get(f"/queues/{live.uuid}/{page}/").text
    assert re.search(r'<input type="checkbox" name="keep"[^>]* checked', text)
    assert "Archive the messages first" in text
    assert "up to 20,000 messages or 64.0\xa0MB" in text
    assert ("or unacknowledged messages" in text) is (page == "delete")
    PulseUser.objects.update(keeps_archives=False)
    text = as_alice.get(f"/queues/{live.uuid}/{page}/").text
    assert "No message of this queue is archived, because archives are switched off" in text
    assert 'name="keep"' not in text
    assert as_alice.post(f"/queues/{live.uuid}/{page}/", {"typed": NAME}).status_code == 302
    assert not Archive.objects.exists()


def test_an_owner_switches_archives_off_and_on(as_alice, alice):
    page = as_alice.get("/pulse-users/alice/").text
    assert re.search(r'name="keeps_archives"[^>]* checked', page)
    answer = as_alice.post("/pulse-users/alice/archives/", follow=True)
    assert "no longer archives" in answer.text
    assert not PulseUser.objects.get().keeps_archives
    assert AuditEntry.objects.latest("id").changes == {"keeps_archives": ["True", "False"]}
    as_alice.post("/pulse-users/alice/archives/", {"keeps_archives": "on"})
    assert PulseUser.objects.get().keeps_archives
    answer = as_alice.patch("/api/pulse-users/alice/", {"keeps_archives": False}, content_type="application/json")
    assert (answer.json()["keeps_archives"], PulseUser.objects.get().keeps_archives) == (False, False)


def test_the_mail_of_a_deletion_links_to_the_restore(deleted, as_alice, settings):
    notification = Notification.objects.get(kind="deletion", recipient="alice@example.org")
    link = f"{settings.GUARDIAN_BASE_URL}/archives/{deleted.uuid}/restore/"
    mail = compose(notification)
    assert link in mail.body
    assert f'href="{link}"' in mail.alternatives[0][0]
    assert as_alice.get(f"/archives/{deleted.uuid}/restore/").status_code == 200
    notification.facts["account"] = "alice"  # as for a further address, which has no access
    assert link not in compose(notification).body


def test_a_deleted_queue_is_brought_back_with_two_clicks_on_its_page(page: Page, deleted, amqp, alice):
    page.clock.install()
    sign_in(page, alice)
    page.goto(f"/queues/{Queue.objects.get().uuid}/")
    page.get_by_role("link", name="Bring it back").click()
    page.get_by_role("button", name="Bring the queue back").click()
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "0")
    assert replay.run_due() == 20
    page.clock.fast_forward("00:02")
    expect(page.get_by_role("status")).to_have_text("The queue is back, with 0 bindings and 20 messages.")
    page.get_by_role("link", name="Open the queue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(NAME)


ODD_BODIES = (
    ("x" * 30_000).encode(),
    ("a\u202e\u2066\u200f\x00 שלום\n" * 400).encode(),
    json.dumps({"<b>": ["<svg onload=alert(1)>"] * 400, "deep": {"k" * 300: {"l" * 300: 1}}}).encode(),
    b"\xff" * 5_000,
    b"",
)


@pytest.mark.parametrize("part", ["", *[f"messages/{position}/" for position in range(1, len(ODD_BODIES) + 1)]])
def test_odd_messages_break_no_page(page: Page, alice, live_server, part):
    headers = {"h" * 100: "v" * 900, "table": {"a": list(range(200))}}
    messages = [
        Fetched(body, {"content_type": "c" * 200, "correlation_id": "\u202e" * 60}, headers, "e" * 200, "r" * 250, True)
        for body in ODD_BODIES
    ]
    archive = store_archive(*messages, name="queue/alice/" + "n" * 200)
    sign_in(page, alice)
    address = f"/archives/{archive.uuid}/{part}"
    assert list(violations(page, address)) == []
    for details in page.locator("details").all():
        details.locator("summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1600
    assert page.locator("svg[onload], script:not([src])").count() == 0
