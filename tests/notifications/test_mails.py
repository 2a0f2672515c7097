"""The texts of the mails, and queue names that could break them."""

import email
import email.policy
import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
import time_machine
from django.utils import timezone
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from accounts.models import Invitation, NotificationAddress, Owner, PulseUser
from accounts.pulse_users import addresses
from core.formatting import duration, rate_in_words
from guardian_site.help_pages import rendered
from notifications import kinds
from notifications.kinds import Obsolete
from notifications.mails import compose
from notifications.models import Notification
from rabbit.names import INVISIBLE, readable
from tests.support.plugin import ROOT
from tests.support.toolbox import stored_queue

DOCS = ROOT / "docs"

FACTS = {
    "queue": "queue/alice/builds", "vhost": "/", "state": "warned",
    "length": 2104, "ready": 2000, "unacknowledged": 104, "warn": 2000, "max": 8000, "spared": False,
    "per_second": 3.5, "seconds_to_max": 1684, "seconds_over": 86_400, "consumers": 0, "folded": 3,
    "owners": ["alice@example.org"],
    "bindings": [{"exchange": "exchange/ci/events", "routing_key": "build.#"}], "more_bindings": 0,
    "error": "no answer", "seconds": 90, "count": 60, "seen": 100, "missing": 70,
    "resource": "memory", "node": "rabbit@a", "running": True, "others": ["rabbit@b"],
    "asks": "bob@example.org", "reason": "I run the nightly builds.", "wanted": 50_000,
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e", "by": "ops@example.org",
    "queues": 3, "ok": 1, "warned": 2, "deleting": 0, "deleted": 1, "more_happened": 0, "more_unattended": 4,
    "happened": [{"queue": "queue/alice/builds", "warnings": 2, "deletions": 1}],
    "orphans": [{"vhost": "a" * 32, "queue": "subscription_1"}], "more": 2, "stale": False,
    "pulse_user": "alice", "pulse_users": ["alice"], "invitee": "bob@example.org", "accepted": True,
    "left": ["bob@example.org"], "shown": [{"vhost": "/", "queue": "odd"}],
    "step": "announce", "until": "2026-01-02T00:00:00+00:00", "old": 8000,
    "longest": [{"queue": "queue/alice/long", "length": 2104}], "unattended": [{"queue": "queue/alice/lonely"}],
}  # fmt: skip


def notification(kind="warning", **facts):
    return Notification(
        kind=kind, recipient="alice@example.org", facts={**FACTS, **facts}, created=datetime(2026, 1, 1, tzinfo=UTC)
    )


def parsed(mail):
    return email.message_from_bytes(mail.message().as_bytes(), policy=email.policy.default)


def part(mail, form):
    return parsed(mail).get_body((form,)).get_content()


class Page(HTMLParser):
    """The tags of a page, and its text with the addresses of links."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "body":
            self.text = ""
        self.text += f" {dict(attrs).get('href', '')} "

    def handle_data(self, data):
        self.text += data


def words(mail, form):
    """Return the text of a mail, or that of its HTML with the addresses of links, in one line."""
    text = part(mail, form)
    return " ".join((Page(text).text if form == "html" else text).split())


def assert_says(mail, *sentences):
    """Assert that the text and the HTML of a mail contain these."""
    for form in ("plain", "html"):
        text = f"{mail.subject} {words(mail, form)}"
        assert [sentence for sentence in sentences if sentence not in text] == []


@pytest.fixture
def address(db):
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    pulse_user = PulseUser.objects.create(username="alice")
    pulse_user.owners.add(alice)
    return NotificationAddress.objects.create(pulse_user=pulse_user, email="team@example.org", added_by=alice)


@pytest.fixture
def complete(address):
    """Return a function that returns a notification of a kind to Alice, about what exists in the database."""
    bob = Owner.objects.create_user("bob@example.org")
    inviter = Owner.objects.get(email="alice@example.org")
    invitation = Invitation.objects.create(pulse_user=address.pulse_user, invitee=bob, inviter=inviter)
    queue = stored_queue("queue/alice/builds", pulse_user=address.pulse_user)

    def complete(kind):
        facts = {"address": str(address.uuid), "invitation": str(invitation.uuid)}
        if kind == "confirm-address":
            facts["account"] = "alice"
        if not kinds.get(kind).topic:
            return notification(kind, **facts, owners=[])
        one = notification(kind, **facts)
        one.about = f"queue {queue.id}"
        return one

    return complete


@pytest.mark.parametrize("kind", kinds.names())
def test_a_mail_says_what_happened_what_happens_next_what_to_do_and_why_it_is_sent(kind, complete):
    with time_machine.travel(timezone.now(), tick=False):  # links are signed with the time
        content = kinds.get(kind).content(complete(kind))
        mail = compose(complete(kind))
    parts = [content.happened, f"What happens next: {content.next}", content.action.text, content.action.url,
             *content.facts[0], "You get this "]  # fmt: skip
    in_order = ".*".join(re.escape(one) for one in parts)
    text, html = (words(mail, form) for form in ("plain", "html"))
    assert re.match(in_order, text)
    assert re.match(in_order, html)
    assert {word.strip(":") for word in text.split()} - {"--"} == {word.strip(":") for word in html.split()}


def test_mails_are_built_where_they_get_the_headers_against_automatic_answers():
    """The fixture ``mailbox`` checks these headers of each mail that a test sends."""
    apps = [
        "accounts",
        "agents",
        "core",
        "guardian_site",
        "message_store",
        "notifications",
        "queues",
        "rabbit",
        "status",
    ]
    paths = [path for app in apps for path in (ROOT / app).rglob("*.py")]
    built = re.compile(r"(EmailMessage|EmailMultiAlternatives|send_mass_mail|mail_admins|mail_managers|render_mail)\(")
    found = {str(path.relative_to(ROOT)) for path in paths if built.search(path.read_text())}
    assert found == {"notifications/mails.py", "accounts/signing_in/codes.py"}


PLACEHOLDERS = {
    r"queue/alice/builds": "QUEUE", r"\w+@example\.org": "ADDRESS", "rabbit@a": "NODE", "alice": "NAME",
    r"\d[\d,]*": "N",
}  # fmt: skip


@pytest.mark.parametrize("kind", kinds.names())
def test_the_documents_explain_every_mail(kind, complete):
    subject = kinds.get(kind).content(complete(kind)).subject
    for pattern, placeholder in PLACEHOLDERS.items():
        subject = re.sub(pattern, placeholder, subject)
    assert subject in "".join((DOCS / f"{name}.md").read_text() for name in ("owners", "operators"))


@pytest.mark.parametrize("kind", kinds.names())
def test_the_help_of_a_mail_is_a_section_of_the_documents(kind, complete):
    linked = kinds.get(kind).content(complete(kind)).help
    if linked:
        section = linked.url.partition("/help/operators/#")[2]
        assert f'id="{section}"' in rendered("operators")[1]


def test_a_confirmation_mail_links_to_the_confirmation_of_its_address(address):
    text = part(compose(notification("confirm-address", address=str(address.uuid), account="alice")), "plain")
    token = re.search(r"/addresses/([^/\s]+)/", text)[1]
    assert addresses.address_for_token(token) == address


@pytest.mark.parametrize("what", ["confirmed", "removed"])
def test_a_confirmed_or_removed_address_gets_no_confirmation_mail(address, what):
    if what == "confirmed":
        NotificationAddress.objects.update(confirmed_at=datetime.now(UTC))
    else:
        address.delete()
    with pytest.raises(Obsolete):
        compose(notification("confirm-address", address=str(address.uuid)))


def test_the_weekly_summary_lists_states_and_events_of_queues():
    assert_says(
        compose(notification("weekly")),
        "3 queues", "1 within its limits", "2 over the warning threshold", "2 warnings", "deleted", "queue/alice/long",
        "2,104 messages", "queue/alice/lonely", "and 4 more", "/queues/", "/settings/",
    )  # fmt: skip


def test_a_weekly_summary_without_events_is_short():
    quiet_week = notification("weekly", happened=[], longest=[], unattended=[], deleted=0, warned=0, queues=1)
    mail = compose(quiet_week)
    assert mail.subject == "[Guardian] Your week: 1 queue"
    assert "there were no warnings and no deletions" in part(mail, "plain")
    assert "Longest" not in part(mail, "plain")


def test_a_warning_shows_lengths_rate_consumers_and_bindings():
    assert_says(
        compose(notification()),
        "queue/alice/builds", "2,104", "2,000 ready", "104 unacknowledged", "8,000", "growing by 210 messages a minute",
        "28 minutes", "none", "exchange/ci/events", "build.#", "What happens next",
    )  # fmt: skip


REGISTERED = {
    "spared": True, "agents": True, "registered": True, "dead_letters": False, "holds": 10_000, "seconds_kept": 3600.0
}  # fmt: skip
DEAD_LETTERS = {**REGISTERED, "dead_letters": True, "seconds_kept": 604_800.0}


@pytest.mark.parametrize("kind", ["warning", "summary", "no-consumers"])
def test_a_mail_about_a_registered_queue_explains_its_limits(kind):
    assert_says(
        compose(notification(kind, **REGISTERED)),
        "Guardian never deletes this queue for its length.",
        "The broker keeps at most 10,000 messages in it, each for 60 minutes.",
        "the agent does not get them",
        "alice@example.org, whose agent registered it",
        "because the queue belongs to your agents",
        "Start its agent",
        "remove the agent's subscription",
    )


SENTENCES = {
    "an unbounded queue": ("warning", {"spared": True}, ["none: never deleted for its length"]),
    "an orphan": (
        "warning", {"agents": True, "registered": False},
        ["alice@example.org, the owner of the agents' virtual host", "Guardian deletes it with all its messages"],
    ),
    "the dead-letter queue": (
        "warning", DEAD_LETTERS,
        ["Agents could not get them", "The broker keeps its last 10,000 messages for 7 days",
         "Find the agent whose queue is long"],
    ),
    "a deletion": (
        "deletion", {"length": 8001},
        ["Guardian deleted the queue queue/alice/builds.",
         "It had 8,001 messages, and its deletion limit is 8,000."],
    ),
    "a last call": (
        "last-call", {"length": 7_000},
        ["Last call: queue/alice/builds is deleted in 28 minutes",
         "has 7,000 messages. Guardian deletes it past 8,000. At its present rate, that is in 28 minutes, at "
         "2026-01-01 00:28 UTC.",
         "archives the ready messages for 7 days", "up to 20,000 messages or 64.0 MB",
         "It can't archive unacknowledged messages: 104 at the moment.", "Start its consumer: the queue has none.",
         "ask for a higher limit"],
    ),
    "a last call about a queue that does not grow": (
        "last-call", {"length": 7_000, "seconds_to_max": None},
        ["Last call: queue/alice/builds has 7,000 of 8,000 messages", "It does not grow at the moment."],
    ),
    "a last call about a queue that is not archived": (
        "last-call", {"why_not_archived": "archives are switched off for it"},
        ["all its messages are lost: they can't be archived, because archives are switched off for it."],
    ),
    "an alarm over": ("alarm-over", {}, ["Publishers can publish again"]),
    "an alarm over with its node": ("alarm-over", {"running": False}, ["because the node is down.", "Start the node."]),
    "a node back": ("node-back", {}, ["The node rabbit@a is running again"]),
    "a node that left": ("node-back", {"running": False}, ["The node rabbit@a is no longer in the cluster"]),
    "a carriage return": ("limit-request", {"reason": "x\rWhat you can do:"}, ["x\\x0dWhat you can do:"]),
    "an invisible character": ("vouch-request", {"reason": "Please \u202e help."}, ["Please \\u202e help."]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "facts", "sentences"), SENTENCES.values(), ids=SENTENCES)
def test_a_mail_explains_the_case(kind, facts, sentences):
    assert_says(compose(notification(kind, **facts)), *sentences)


@pytest.mark.parametrize(("facts", "absent"), [({"spared": True}, "Guardian deletes it"), (DEAD_LETTERS, "Start its")])
def test_a_warning_announces_nothing_that_will_not_happen(facts, absent):
    assert absent not in words(compose(notification(**facts)), "plain")


def test_a_warning_says_that_the_broker_could_not_be_queried():
    text = part(compose(notification(consumers=None, bindings=None)), "plain")
    assert text.count("unknown: the broker did not answer") == 2


@pytest.mark.parametrize("kind", ["warning", "summary", "no-consumers", "consumers-back", "deletion"])
def test_a_mail_shows_the_time_of_its_figures_in_utc(kind):
    earlier = notification(kind)
    earlier.created = datetime.fromisoformat("2026-01-01T23:30:00-02:00")
    assert_says(compose(earlier), "As of", "2026-01-02 01:30 UTC")


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=255)


@hypothesis_settings(max_examples=25)
@given(names)
def test_no_queue_name_breaks_a_header_or_adds_a_tag_to_the_html(name):
    plain, mail = compose(notification()), compose(notification(queue=name))
    assert list(parsed(mail).keys()) == list(parsed(plain).keys())
    assert "\n" not in mail.subject
    assert Page(part(mail, "html")).tags == Page(part(plain, "html")).tags


@given(names)
def test_a_readable_name_is_printable_and_a_visible_one_is_unchanged(name):
    shown = readable(name)
    assert shown.isprintable()
    assert not INVISIBLE.search(shown)
    assert shown == name or not name.isprintable() or INVISIBLE.search(name)


@pytest.mark.parametrize(
    ("per_second", "words"),
    [
        (None, ""), (0.0, "not growing"), (12.0, "growing by 12 messages a second"),
        (-0.5, "shrinking by 30 messages a minute"), (0.005, "growing by 18 messages an hour"),
        (1.0, "growing by 60 messages a minute"),
    ],
)  # fmt: skip
def test_a_rate_is_written_in_the_unit_that_fits(per_second, words):
    assert rate_in_words(per_second) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (1, "1 second"), (89, "89 seconds"), (600, "10 minutes"), (7200, "2 hours"), (200_000, "2 days")],
)
def test_a_duration_is_written_in_the_unit_that_fits(seconds, words):
    assert duration(seconds) == words
