"""The pages of the message store, and its applications and keys in the admin."""

import re
import uuid
from html import unescape
from urllib.parse import quote

import pytest

from accounts.models import AuditEntry
from guardian_store import _ids as ids
from message_store import applications, queues
from message_store.database.store import DatabaseStore
from message_store.models import Application, ApplicationKey
from message_store.pages import views
from message_store.parameters import MessageRef
from message_store.queues import MessageInput
from message_store.store import STORES, StoreUnavailable
from tests.support.toolbox import messages_of, raising

MARKUP = "<script>\u202e'\""
ODD = "odd <b>&\"'%25 ?#é+\u202e"


@pytest.fixture
def application(db):
    return applications.create_application("notices")


@pytest.fixture
def visit(client):
    def sign_in(owner):
        client.force_login(owner)
        return client

    return sign_in


def page_of(*names):
    return "/".join(["/message-store", *(quote(name, safe="") for name in names), ""])


def post(queue, *bodies, **fields):
    return [queues.post(queue, MessageInput(body, **fields)) for body in bodies]


# The lists


def test_an_operator_sees_every_application_and_its_queues(application, visit, operator):
    applications.create_application("other")
    applications.create_key(application)
    applications.create_key(application)
    queues.create("notices", "alice", principals="bid:alice@example.org")
    client = visit(operator)
    page = client.get("/message-store/")
    assert [row.split("<")[0] for row in re.findall(r'class="name" href="[^"]*">([^\n]*)', page.text)] == [
        "notices",
        "other",
    ]
    assert 'data-label="Keys">2<' in page.text
    assert "other" not in client.get("/message-store/", {"search": "OTIC"}).text
    assert "No application's name contains" in client.get("/message-store/", {"search": MARKUP}).text
    assert f'href="{page_of("notices", "alice")}"' in client.get(page_of("notices")).text
    assert "No queue yet" in client.get(page_of("other")).text
    assert client.get(page_of("none")).status_code == 404


def test_an_owner_sees_only_queues_that_name_them(application, visit, alice):
    applications.create_application("other")
    for name, readers in (
        ("a", "bid:Alice@example.org,bid:bob@example.org"), ("b", "bid:alice@example.org.uk"), ("c", None),
        ("d", "app:other"),
    ):  # fmt: skip
        queues.create("notices", name, principals=readers)
    public = queues.create("notices", "e", type="public")
    queues.create("other", "a", principals="bid:bob@example.org")
    client = visit(alice)
    for page in ("/message-store/", page_of("notices")):
        links = set(re.findall(r'href="(/message-store/[^"/]*/[^"/]*/)"', client.get(page).text))
        assert links == {page_of("notices", "a")}
    assert "None" not in client.get("/message-store/").text
    assert client.get(page_of("other")).status_code == 404
    seen = {name: client.get(page_of("notices", name)).status_code for name in "abcdef"}
    assert seen == {"a": 200, "b": 404, "c": 404, "d": 404, "e": 200, "f": 404}
    queues.set_positions(public, "worker", {"1": str(post(public, b"x")[0].id.hex)})
    assert "worker" not in client.get(page_of("notices", "e")).text


def test_a_list_goes_on_where_its_page_ends(application, visit, alice, operator, monkeypatch):
    monkeypatch.setattr(views, "QUEUES_PER_PAGE", 2)
    for number in range(5):
        queues.create("notices", f"q{number}", principals="bid:alice@example.org")
    for owner, address in ((operator, page_of("notices")), (alice, page_of("notices")), (alice, "/message-store/")):
        seen, more = [], address
        while more:
            text = visit(owner).get(more).text
            seen += re.findall(r'href="/message-store/notices/(q\d)/"', text)
            further = re.search(r'rel="next" href="([^"]*)"', text)
            more = address + further[1].replace("&amp;", "&") if further else ""
        assert seen == ["q0", "q1", "q2", "q3", "q4"]
        assert "q3" in visit(owner).get(page_of("notices"), {"from": "q3"}).text
        for beyond in ("zzz", "\0", "x" * 1000, MARKUP):
            page = visit(owner).get(page_of("notices"), {"from": beyond, "application": beyond})
            assert page.status_code == 200
            assert MARKUP not in page.text


# The navigation


def test_the_navigation_links_to_the_store_if_there_is_something_to_see(visit, alice, operator):
    def is_shown(owner):
        return 'href="/message-store/"' in visit(owner).get("/tokens/").text

    assert not is_shown(alice)
    assert not is_shown(operator)
    applications.create_application("notices")
    assert not is_shown(alice)
    assert is_shown(operator)
    queues.create("notices", "a", principals="bid:alice@example.org")
    assert is_shown(alice)


# The page of a queue


def test_a_queue_shows_its_messages_page_by_page_from_either_end(application, visit, alice, monkeypatch):
    monkeypatch.setattr(views, "MESSAGES_PER_PAGE", 3)
    queue = queues.create("notices", "a", partitions=2, principals="bid:alice@example.org")
    post(queue, *(f"message {n}".encode() for n in range(7)), partition=2)
    client = visit(alice)

    def shown_and_next(address):
        text = client.get(address).text
        further = re.search(r'rel="next" href="([^"]*)"', text)
        return re.findall(r"message (\d)", text), page_of("notices", "a") + further[1].replace("&amp;", "&").partition(
            "#"
        )[0] if further else ""

    for order, expected in (("descending", "6543210"), ("ascending", "0123456")):
        seen, more = "", f"{page_of('notices', 'a')}?partition=2&order={order}"
        while more:
            shown, more = shown_and_next(more)
            assert len(shown) <= 3
            seen += "".join(shown)
        assert seen == expected
    page = client.get(page_of("notices", "a"))
    assert "It has 7 messages, in 2 partitions." in page.text
    assert "Partition 1 has no messages at the moment." in page.text


def test_reading_starts_at_a_time_a_day_or_an_id(application, visit, operator):
    queue = queues.create("notices", "a")
    found = []
    for at in ("2025-12-31T23:59:59.9999999", "2026-01-01T00:00:00", "2026-01-01T12:00:00"):
        seconds, _, part = at.partition(".")
        ticks = int(views.parse_datetime(f"{seconds}+00:00").timestamp()) * ids.TICKS_PER_SECOND + int(part or 0)
        found.append(ids.message_id(ids.Place(ticks, 0x8100_0000_0000_0001)))
        queues.overwrite(queue, [MessageRef(1, found[-1])], MessageInput(f"message {len(found)}".encode()))
    client = visit(operator)
    cases = (
        ("2026-01-01", "23", "21"),
        ("2026-01-01 13:00+01:00", "3", "321"),
        ("1767268800.0000001", "", "321"),
        (found[1].hex, "23", "21"),
        ("0001-01-01", "123", ""),
        ("9999-12-31T23:59:59-12:00", "", "321"),
    )
    for since, forward, backward in cases:
        for order, expected in (("ascending", forward), ("descending", backward)):
            text = client.get(page_of("notices", "a"), {"since": since, "order": order}).text
            shown = "".join(re.findall(r"message (\d)<", text))
            assert shown == expected, (since, order)


@pytest.mark.parametrize(
    ("query", "error_text"),
    [
        ({"partition": "3"}, "less than or equal to 2"),
        ({"partition": "9" * 5000}, "whole number"),
        ({"order": "sideways"}, "not one of the available choices"),
        ({"since": "yesterday"}, "Write a time"),
        ({"since": "2026-13-40"}, "Write a time"),
        ({"since": "\0"}, "Null characters"),
    ],
)
def test_an_invalid_filter_has_an_error_at_its_field(application, visit, operator, query, error_text):
    queues.create("notices", "a", partitions=2)
    page = visit(operator).get(page_of("notices", "a"), query)
    assert page.status_code == 200
    assert error_text in page.text


def test_a_message_is_shown_as_escaped_text_or_hex(application, visit, operator):
    queue = queues.create("notices", "a")
    post(queue, f"{MARKUP}\r\n\tsecond\0line".encode(), content_type="text/html")
    post(queue, b"\xff\xfe" + b"\0" * 600, content_type="image/png")
    post(queue, "é".encode() * 6000)
    text = visit(operator).get(page_of("notices", "a")).text
    assert MARKUP not in text
    assert "&lt;script&gt;\\u202e&#x27;&quot;\n\tsecond\\x00line<" in text
    assert "text/html" in text
    assert "ff fe 00" in text
    assert "90 more bytes" in text
    assert "1,000 more characters" in text
    assert text.count("é") == views.MAX_TEXT_CHARACTERS


def test_a_queue_of_any_name_has_a_page(application, visit, alice):
    queues.create("notices", ODD, principals="bid:alice@example.org")
    client = visit(alice)
    page = client.get(page_of("notices"))
    assert "<b>" not in page.text
    assert "\u202e" not in page.text
    (link,) = re.findall(r'href="(/message-store/notices/[^"]+/)"', page.text)
    page = client.get(unescape(link))
    assert page.status_code == 200
    assert "\u202e" not in page.text
    assert client.get("/message-store/notices/a%00b/").status_code == 404
    assert client.get("/message-store/a%00b/").status_code == 404
    assert client.get("/message-store/a%00b/c/").status_code == 404
    assert client.get(page_of("notices", "x" * 51)).status_code == 404


def test_a_queue_shows_how_far_its_consumers_are(application, visit, alice, monkeypatch):
    monkeypatch.setattr(views, "MAX_CONSUMERS", 2)
    queue = queues.create("notices", "a", partitions=2, principals="bid:alice@example.org")
    (first,) = post(queue, b"one", partition=1)
    queues.set_positions(queue, "mailer", {"1": first.id.hex})
    queues.set_positions(queue, "other", {"2": str(uuid.uuid1().hex)})
    page = visit(alice).get(page_of("notices", "a"))
    assert "mailer" in page.text
    assert "none yet" in page.text
    assert f"since={first.id.hex}#messages" in page.text
    assert "There are more consumers" not in page.text
    queues.set_positions(queue, "third", {"1": first.id.hex})
    assert "There are more consumers" in visit(alice).get(page_of("notices", "a")).text


# The store unavailable


def test_without_the_store_its_pages_are_503_and_other_pages_work(
    application, visit, alice, operator, settings, monkeypatch
):
    queues.create("notices", "a", principals="bid:alice@example.org")

    monkeypatch.setitem(STORES, "unavailable", "tests.message_store.test_message_store_api.UnavailableStore")
    settings.MESSAGE_STORE = "unavailable"
    for owner in (alice, operator):
        for page in ("/message-store/", page_of("notices"), page_of("notices", "a")):
            answer = visit(owner).get(page)
            assert answer.status_code == 503
            assert "does not answer" in answer.text
        assert visit(owner).get("/tokens/").status_code == 200


# The admin


def run_action(client, model, action, *rows, **answers):
    form = {"action": action, "_selected_action": [row.pk for row in rows], **answers}
    return client.post(f"/admin/message_store/{model._meta.model_name}/", form)


def confirm(client, page):
    fields = ("action", "_selected_action", "select_across", "chosen", "post")
    form = {name: re.search(f'name="{name}" value="([^"]*)"', page.text)[1] for name in fields}
    return client.post(page.request["PATH_INFO"], form)


def key_in(answer):
    return re.search(r'id="key">([0-9a-f]{64})<', answer.text)[1]


def test_a_new_application_has_a_key_that_is_shown_once(visit, operator):
    client = visit(operator)
    answer = client.post("/admin/message_store/application/add/", {"name": "notices"})
    assert answer.status_code == 201
    assert "no-store" in answer["Cache-Control"]
    key = key_in(answer)
    assert applications.application_for_key(key) == "notices"
    row = ApplicationKey.objects.get()
    for page in ("application/", f"application/{row.application_id}/change/", "applicationkey/",
                 f"applicationkey/{row.pk}/change/"):  # fmt: skip
        text = client.get(f"/admin/message_store/{page}").text
        assert key not in text
        assert row.digest not in text
    entries = AuditEntry.objects.filter(content_type__app_label="message_store").order_by("pk")
    assert [(entry.event, entry.actor) for entry in entries] == [("created", operator), ("created", operator)]
    assert key not in str([entry.__dict__ for entry in entries])


@pytest.mark.parametrize("name", ["", MARKUP, "notices"])
def test_an_invalid_application_name_has_an_error_at_its_field(visit, operator, application, name):
    answer = visit(operator).post("/admin/message_store/application/add/", {"name": name})
    assert answer.status_code == 200
    assert "errorlist" in answer.text
    assert [one.name for one in Application.objects.all()] == ["notices"]
    assert not ApplicationKey.objects.exists()


def test_another_key_is_created_for_one_application_up_to_a_maximum(visit, operator, application, monkeypatch):
    client, other = visit(operator), applications.create_application("other")
    assert messages_of(run_action(client, Application, "create_key", application, other)) == [
        "A key is shown only once. Select one application."
    ]
    question = run_action(client, Application, "create_key", application)
    assert question.status_code == 200
    assert not ApplicationKey.objects.exists()
    answer = confirm(client, question)
    assert answer.status_code == 201
    assert "no-store" in answer["Cache-Control"]
    assert applications.application_for_key(key_in(answer)) == "notices"
    monkeypatch.setattr(applications, "MAX_KEYS", 1)
    assert "has 1 keys" in messages_of(confirm(client, question))[0]
    application.delete()
    assert messages_of(confirm(client, question)) == ["None of these exists any more."]


def test_a_revoked_key_is_unknown_and_other_keys_stay_valid(visit, operator, application):
    row, key = applications.create_key(application)
    _, other = applications.create_key(application)
    client = visit(operator)
    answer = confirm(client, run_action(client, ApplicationKey, "revoke", row))
    assert messages_of(answer)[0].startswith("1 is revoked")
    with pytest.raises(applications.UnknownKey):
        applications.application_for_key(key)
    assert applications.application_for_key(other) == "notices"
    entry = AuditEntry.objects.latest("pk")
    assert (entry.event, entry.actor, entry.additional_data["application"]) == ("revoked", operator, "notices")


def test_an_operator_removes_only_applications_without_queues(visit, operator, application):
    other = applications.create_application("other")
    for one in (application, other):
        applications.create_key(one)
    queues.create("notices", "a")
    client = visit(operator)
    answer = confirm(client, run_action(client, Application, "remove", application, other))
    failed, done = messages_of(answer)
    assert "notices has queues" in failed
    assert done == "1 is removed: other."
    assert [key.application for key in ApplicationKey.objects.all()] == [application]
    question = run_action(client, Application, "remove", application)
    with raising(DatabaseStore, "queues", StoreUnavailable("The database is away")):
        assert "The database is away" in messages_of(confirm(client, question))[0]
    assert Application.objects.exists()
