"""The page of a queue, its actions and its limits."""

import re
from datetime import timedelta
from html import unescape

import pika
import pytest
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.actions import rates, single
from queues.actions.endings import describe_event
from queues.guard.once import run_once
from queues.models import Queue, QueueEvent, QueueSample, Watch
from queues.rules.thresholds import FETCH_PAUSE
from rabbit.names import readable
from tests.support.api import Program
from tests.support.counting import counted_requests
from tests.support.toolbox import AWAY, AWAY_AMQP, queue_lengths, queue_names, stored_queue, wait_until

pytestmark = pytest.mark.usefixtures("pulse_user")


@pytest.fixture
def alices_queue(as_alice):
    """Return Alice's queue over its warning threshold, with Alice signed in."""
    now = timezone.now()
    queue = stored_queue(
        "queue/alice/<b>\u202e", ready=2100, unacknowledged=4, state="warned", pulse_user=PulseUser.objects.get(),
        consumers=2,
    )  # fmt: skip
    queue.new_event("warned", at=now, length=7).save()
    Watch.objects.create(listed_at=now, consumers_counted_at=now)
    return queue


@pytest.fixture
def listed_queue(guarded, amqp, as_alice):
    """Give Alice's queue with 3 messages after a pass, with Alice signed in."""
    amqp.queue("queue/alice/builds", 3)
    run_once()
    return Queue.objects.get()


# The page


def page_of(queue, client, **query):
    return client.get(f"/queues/{queue.uuid}/", query).text


def test_the_page_shows_state_lengths_and_limits(alices_queue, client, alice):
    page = page_of(alices_queue, client)
    for what in ("over threshold", "2,104", "8,000", "2,000", "alice@example.org",
                 "reached its warning threshold"):  # fmt: skip
        assert what in page
    assert "queue/alice/&lt;b&gt;\\u202e" in page
    assert "<b>\u202e" not in page


def test_the_page_shows_bindings_and_consumers(listed_queue, client, amqp):
    amqp.channel.exchange_declare("exchange/alice/ev<i>ents", "topic", durable=True)
    amqp.channel.queue_bind(listed_queue.name, "exchange/alice/ev<i>ents", "build.\u202e#")
    page = page_of(listed_queue, client)
    for what in ("exchange/alice/ev&lt;i&gt;ents", "build.\\u202e#", "None: start its consumer"):
        assert what in page


def test_the_page_shows_the_arguments(guarded, amqp, as_alice):
    amqp.queue("queue/alice/short", arguments={"x-max-length": 12, "x-overflow": "reject-publish"})
    run_once()
    page = page_of(Queue.objects.get(), as_alice)
    assert '<code class="name">x-max-length</code> = <code class="name">12</code>' in page
    assert "reject-publish" in page


def test_the_page_says_first_why_the_queue_grows_as_of_now(listed_queue, client, amqp):
    Queue.objects.update(consumers=2)
    Watch.objects.update(consumers_counted_at=timezone.now())
    page = page_of(listed_queue, client)
    assert page.index("It has no consumer.") < page.index("<dt>Messages</dt>")
    # What the page fetched is stored, for mails.
    listed_queue.refresh_from_db()
    assert listed_queue.activity["consumers"] == 0


def test_without_the_broker_the_page_shows_stored_figures(listed_queue, client, settings):
    Queue.objects.update(consumers=4)
    Watch.objects.update(consumers_counted_at=timezone.now(), outage_since=timezone.now())
    Watch.objects.update(listed_at=timezone.now() - timedelta(minutes=5))
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    answer = client.get(f"/queues/{listed_queue.uuid}/")
    assert answer.status_code == 200
    assert re.search(r"Counted <time .*?</time>; the broker did not answer", answer.text)
    assert answer.text.lower().count("unknown: the broker did not answer") == 2
    assert "the broker does not answer.</p>" in answer.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ready": 10, "state": "ok"}, "Nothing is wrong. It has 2 consumers and 14 messages."),
        ({"ready": 10}, "Its owners are warned at 2,000 messages."),
        ({"ready": 10, "consumers": 0}, "14 messages wait. Start its consumer."),
        ({"ready": 3000, "state": "warned"}, "Guardian deletes it past 8,000 messages."),
        ({"ready": 9000, "state": "deleting"}, "It is over its deletion limit of 8,000 messages. Guardian rechecks"),
        ({"ready": 1, "state": "deleting"}, "its name does not follow the pattern"),
        ({"ready": 1, "state": "deleting", "block_reason": "brake"}, "Its deletion is blocked until an operator"),
        ({"ready": None, "type": "stream"}, "A stream keeps messages after they are read"),
        ({"unbounded": True}, "none: the queue is unbounded"),
        ({"registered": True}, "only operators can purge or delete it"),
    ],
)
def test_the_page_says_what_happens_next(alices_queue, client, fields, expected):
    Queue.objects.update(**fields)
    assert expected in page_of(alices_queue, client)


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (1000, 1300, "At its current rate, its owners are warned in 4 minutes."),
        (4000, 5000, "At its current rate, it reaches that in 6 minutes."),
        (4000, 3000, "It is shrinking at the moment."),
    ],
)
def test_the_page_shows_the_growth_rate(alices_queue, client, then, now, expected):
    began = timezone.now() - timedelta(seconds=110)
    QueueSample.objects.create(queue=alices_queue, at=began, length=then)
    Queue.objects.update(ready=now, unacknowledged=0, state="warned" if now >= 2000 else "ok")
    assert expected in page_of(alices_queue, client)


def test_the_page_of_a_stream_has_no_limits(alices_queue, client):
    Queue.objects.update(ready=None, unacknowledged=None, type="stream")
    page = page_of(alices_queue, client)
    assert '<span class="state normal">no length</span>' in page
    assert "Deletion limit" not in page


def test_the_page_says_until_when_the_messages_are_not_fetched_again(alices_queue, client):
    now = timezone.now()
    Queue.objects.update(attempted_at=now, returned_at=now, max_length=2100)
    text = page_of(alices_queue, client)
    assert "Guardian deletes it past 4,200" in text
    _, _, until = text.partition("does not fetch them again until")
    assert f">{timezone.localtime(now + FETCH_PAUSE):%H:%M}" in until[:100]


def test_the_page_of_a_gone_queue_has_no_buttons(alices_queue, client):
    Queue.objects.update(state="gone", ready=None, unacknowledged=None)
    page = page_of(alices_queue, client)
    assert "This queue is gone. It was last listed on the broker" in page
    for what in (f"{alices_queue.uuid}/delete/", "/purge/", "/limits/", "django_htmx"):
        assert what not in page


def test_the_page_lists_events_with_actor_and_details(alices_queue, client, alice, operator):
    for kind, by, details in (
        ("purged", alice, {"length": 12_345}),
        ("adjusted", operator, {"before": {"warn_length": None}, "after": {"warn_length": 3000}}),
        ("removed", None, {"length": 1, "with": "alice"}),
    ):
        alices_queue.new_event(kind, by, **details).save()
    page = page_of(alices_queue, client)
    for what in ("purged", "12,345", "limits changed (warning threshold: 3,000)", "ops@example.org",
                 "deleted (with the Pulse user alice)"):  # fmt: skip
        assert what in page


@pytest.mark.parametrize(
    ("kind", "details", "described"),
    [
        ("deleted", {"length": 8600}, ("deleted", "", "Guardian")),
        ("kept", {}, ("kept after a recheck", "", "Guardian")),
        ("gone", {}, ("no longer on the broker", "", "")),
        ("returned", {}, ("back on the broker", "", "")),
        ("warned", {}, ("reached its warning threshold", "", "")),
        ("removed", {}, ("deleted", "", "a deleted owner")),
        ("removed", {"why": "unregistered"}, ("deleted", "because it had no registration", "Guardian")),
    ],
)
def test_an_event_names_who_acted_if_anybody_did(kind, details, described):
    assert describe_event(QueueEvent(kind=kind, details=details)) == described


@pytest.mark.parametrize(("later", "shown"), [(1, True), (-1, False)])
def test_the_page_says_that_a_deletion_is_in_progress(alices_queue, client, alice, later, shown):
    at = Watch.objects.get().listed_at + timedelta(seconds=later)
    alices_queue.new_event("removing", alice, at).save()
    assert ("requested the deletion of this queue" in page_of(alices_queue, client)) is shown


# The chart


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ("hour", "over the last hour: lowest 5"),
        ("day", "over the last day: lowest 1"),
        ("week", "over the last week: lowest 1"),
        ("nonsense", "over the last hour: lowest 5"),
    ],
)
def test_the_chart_covers_the_chosen_span(alices_queue, client, span, words):
    now = timezone.now()
    for ago, length in ((timedelta(days=3), 1), (timedelta(hours=5), 2), (timedelta(hours=2), 5)):
        QueueSample.objects.create(queue=alices_queue, at=now - ago, length=length)
    Queue.objects.update(ready=5, unacknowledged=0, state="ok")
    page = page_of(alices_queue, client, span=span)
    assert f"Messages {words}, highest 5, now 5." in page
    assert "deletion limit 8,000" in page_of(alices_queue, client, span=span, scale="limit")
    assert "style=" not in page


def test_the_chart_shows_an_unchanged_length_without_samples(alices_queue, client):
    Queue.objects.update(first_seen=timezone.now() - timedelta(days=30))
    assert "over the last week: lowest 2,104, highest 2,104" in page_of(alices_queue, client, span="week")


def test_the_chart_of_an_unknown_length_says_so(alices_queue, client):
    Queue.objects.update(ready=None)
    assert "No length was recorded in the last hour." in page_of(alices_queue, client)


def test_the_chart_marks_events_in_words(alices_queue, client, operator):
    now = timezone.now()
    Queue.objects.update(unattended_since=now - timedelta(minutes=30))
    alices_queue.new_event("purged", operator, now - timedelta(minutes=20)).save()
    _, _, marks = page_of(alices_queue, client).partition('<ol class="marks">')
    words = re.findall("</time> ([^<]*)</li>", marks.partition("</ol>")[0])
    assert words == ["first seen without a consumer", "purged by ops@example.org", "reached its warning threshold"]


def test_the_page_shows_rates_with_two_more_requests(listed_queue, client, amqp, monkeypatch):
    monkeypatch.setattr(rates, "CACHE_SECONDS", 0)
    wait_until(lambda: "redelivered 0/s" in page_of(listed_queue, client))  # RabbitMQ counts every 5 s
    with counted_requests() as sent:
        page_of(listed_queue, client, span="week")
    with counted_requests() as sent_with_rates:
        page_of(listed_queue, client)
    assert len(sent_with_rates) == len(sent) + 2
    monkeypatch.setattr(rates, "CACHE_SECONDS", 60)
    page_of(listed_queue, client)
    with counted_requests() as sent_again:
        page_of(listed_queue, client)
    assert len(sent_again) == len(sent)


def test_a_refresh_shows_all_parts_and_queries_the_broker_only_every_few_seconds(listed_queue, client, settings):
    path, htmx = f"/queues/{listed_queue.uuid}/?span=day", {"HX-Request": "true"}
    assert f'id="live" hx-get="{path}"' in client.get(path).text
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    Queue.objects.update(ready=7, unbounded=True, state="warned")  # not to be deleted, however fast it grew
    part = client.get(path, headers=htmx).text
    for what in ("over threshold", "over the last day", "None: start its consumer", "Purge…"):
        assert what in part
    assert "<html" not in part
    assert "None: start its consumer" not in client.get(path).text
    Queue.objects.update(state="gone")
    assert client.get(path, headers=htmx)["HX-Refresh"] == "true"


def agents_queue(owner, name="consumer_1", **fields):
    given = {"ready": 2100, "unacknowledged": 4, "state": "warned", "consumers": 0, "registered": True}
    return stored_queue(name, vhost=owner.uuid.hex, owner=owner, **{**given, **fields})


@pytest.mark.parametrize("visitor", ["alice@example.org", "ops@example.org"])
def test_the_page_of_a_registered_queue_names_the_agents_owner(alice, operator, client, settings, visitor):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    client.force_login(Owner.objects.get(email=visitor))
    text = page_of(agents_queue(alice), client)
    assert "registered by an agent of alice@example.org" in text
    assert 'href="/agents/"' in text
    assert "its agent doesn't keep up" in text.replace("&#x27;", "'")
    assert "at most 10,000 messages" in text
    assert ("Delete…" in text) is (visitor == "ops@example.org")


def test_the_page_of_the_dead_letter_queue_explains_it(alice, as_alice, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    text = page_of(agents_queue(alice, "guardian.dlq"), as_alice)
    assert "dead-letter queue of the agents of alice@example.org" in text
    assert "Agents did not get these messages" in text
    assert "no consumers" not in text


def test_the_page_of_an_orphan_offers_its_deletion(alice, as_alice, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    text = page_of(agents_queue(alice, registered=False), as_alice)
    assert "not registered, but in the virtual host of the agents of alice@example.org" in text
    assert "Delete…" in text


# Deletion and purge


@pytest.mark.parametrize("page", ["delete", "purge"])
def test_the_confirmation_shows_the_effect_and_asks_for_the_name(listed_queue, client, amqp, page):
    amqp.channel.exchange_declare("exchange/alice/events", "topic", durable=True)
    amqp.channel.queue_bind(listed_queue.name, "exchange/alice/events", "build.#")
    text = client.get(f"/queues/{listed_queue.uuid}/{page}/").text
    for what in ('id="name">queue/alice/builds</code>', "<dd>3</dd>", "exchange/alice/events", "build.#",
                 "lost"):  # fmt: skip
        assert what in text


@pytest.mark.parametrize(("page", "left"), [("delete", None), ("purge", 0)])
def test_an_owner_deletes_or_purges_a_queue_by_typing_its_name_exactly(
    listed_queue, client, management, vhost, page, left
):
    path = f"/queues/{listed_queue.uuid}/{page}/"
    for typed in ("", "queue/alice/build", " queue/alice/builds", "QUEUE/alice/builds"):
        answer = client.post(path, {"typed": typed})
        assert 'aria-invalid="true"' in answer.text
    assert queue_lengths(management, vhost) == {listed_queue.name: 3}
    answer = client.post(path, {"typed": listed_queue.name}, follow=True)
    assert answer.redirect_chain == [(f"/queues/{listed_queue.uuid}/", 302)]
    assert f"The queue queue/alice/builds was {page}d." in answer.text
    assert queue_lengths(management, vhost).get(listed_queue.name) == left


def test_any_name_can_be_typed_as_shown(guarded, amqp, as_alice, management, vhost):
    names = (
        "queue/alice/<b>&'\"", "queue/alice/ two  blanks ", "queue/alice/\x01\x1b\u202e\u200f", "queue/alice/\\u202e",
        "queue/alice/\0", "queue/alice/" + "\N{GREEK SMALL LETTER OMEGA}" * 121 + "x",
    )  # fmt: skip
    for name in names:
        amqp.queue(name)
    run_once()
    for queue in Queue.objects.all():
        assert as_alice.get(f"/queues/{queue.uuid}/delete/").status_code == 200
        assert as_alice.post(f"/queues/{queue.uuid}/delete/", {"typed": readable(queue.name)}).status_code == 302
        assert page_of(queue, as_alice).count("deleted this queue</strong>") == 1
    assert queue_names(management, vhost) == set()


@pytest.mark.parametrize(("page", "done"), [("delete", "deleted"), ("purge", "purged")])
def test_deleting_or_purging_a_gone_queue_says_so(listed_queue, client, management, vhost, page, done):
    management.delete_queue(vhost, listed_queue.name)
    answer = client.post(f"/queues/{listed_queue.uuid}/{page}/", {"typed": listed_queue.name}, follow=True)
    assert answer.redirect_chain == [(f"/queues/{listed_queue.uuid}/", 302)]
    assert f"was not {done}" in answer.text
    assert "list the queue at the moment" in answer.text
    for _ in range(3):
        run_once()
    assert "This queue is gone." in page_of(listed_queue, client)
    again = client.post(f"/queues/{listed_queue.uuid}/{page}/", {"typed": listed_queue.name}, follow=True)
    assert "The queue is no longer on the broker." in again.text


@pytest.mark.parametrize("page", ["delete", "purge"])
def test_without_the_broker_the_form_is_503_and_nothing_changes(listed_queue, client, settings, page):
    before = list(Queue.objects.values())
    settings.RABBITMQ_MANAGEMENT_URL, settings.RABBIT_URL = AWAY, AWAY_AMQP
    assert client.get(f"/queues/{listed_queue.uuid}/{page}/").status_code == 200
    answer = client.post(f"/queues/{listed_queue.uuid}/{page}/", {"typed": listed_queue.name})
    assert answer.status_code == 503
    assert "because the broker does not answer. Try again in a minute." in answer.text
    assert f'value="{listed_queue.name}"' in answer.text
    assert list(Queue.objects.values()) == before
    assert not QueueEvent.objects.exists()


def test_a_refused_deletion_shows_the_brokers_reason(guarded, amqp, as_alice):
    amqp.queue("queue/alice/mine", durable=False, exclusive=True)
    run_once()
    Queue.objects.update(exclusive=False)  # as listed before it was declared again
    queue = Queue.objects.get()
    answer = as_alice.post(f"/queues/{queue.uuid}/delete/", {"typed": queue.name})
    assert answer.status_code == 409
    assert "The queue was not deleted, because the broker refuses:" in answer.text
    assert "exclusive" in answer.text
    assert "the broker refuses: RESOURCE_LOCKED" in page_of(queue, as_alice)


EXCLUSIVE = "Only the connection that declared this exclusive queue can delete or purge it."


@pytest.mark.parametrize(
    ("declared", "impossible"),
    [
        ({"durable": False, "exclusive": True}, {"delete": EXCLUSIVE, "purge": EXCLUSIVE}),
        ({"arguments": {"x-queue-type": "stream"}}, {"purge": "A stream can&#x27;t be purged."}),
    ],
    ids=["an exclusive queue", "a stream"],
)
def test_what_the_broker_refuses_is_not_offered_and_answers_409_with_the_reason(
    guarded, amqp, pulse_user, alice, as_alice, declared, impossible
):
    amqp.queue("queue/alice/mine", **declared)
    run_once()
    queue, program = Queue.objects.get(), Program(alice)
    page = page_of(queue, as_alice)
    for action, why in impossible.items():
        assert f"/queues/{queue.uuid}/{action}/" not in page
        assert why in page
        answers = [as_alice.get(f"/queues/{queue.uuid}/{action}/"), as_alice.post(f"/queues/{queue.uuid}/{action}/")]
        assert [(answer.status_code, why in answer.text) for answer in answers] == [(409, True)] * 2
        path = f"queues/{queue.uuid}/"
        answer = program.delete(path) if action == "delete" else program.post(f"{path}purge/")
        assert answer.status_code == 409
        assert unescape(why) in answer.json()["detail"]
    assert (f"/queues/{queue.uuid}/delete/" in page) == ("delete" not in impossible)
    assert "Ask for a higher limit" not in page
    assert "RESOURCE_LOCKED" not in page


def test_a_full_vhost_is_named_on_the_page_and_in_the_api(guarded, amqp, alice, as_alice, management):
    amqp.queue("queue/alice/builds", 3)
    run_once()
    queue = Queue.objects.get()
    management._put("vhost-limits", guarded, "max-connections", json={"value": 1})
    try:
        page = page_of(queue, as_alice)
        form = as_alice.get(f"/queues/{queue.uuid}/delete/")
        answer = as_alice.post(f"/queues/{queue.uuid}/delete/", {"typed": queue.name})
        by_program = Program(alice).delete(f"queues/{queue.uuid}/")
    finally:
        management._delete("vhost-limits", guarded, "max-connections")
    remedy = "connection limit (1) is reached; close connections, or let an operator raise the limit"
    assert (answer.status_code, by_program.status_code) == (409, 409)
    for text in (page, form.text, answer.text, by_program.json()["detail"]):
        assert remedy in text
        assert "not answer" not in text


# Limits


def test_operators_set_the_limits_on_the_page(alices_queue, client, operator):
    client.force_login(operator)
    assert f'href="/queues/{alices_queue.uuid}/limits/"' in page_of(alices_queue, client)
    answer = client.post(
        f"/queues/{alices_queue.uuid}/limits/", {"warn_length": "100", "max_length": "9000"}, follow=True
    )
    assert "The limits are set." in answer.text
    assert "9,000 messages, set for this queue" in answer.text
    assert "limits changed (warning threshold: 100; deletion limit: 9,000)" in answer.text


@pytest.mark.parametrize(
    "limits",
    [{"warn_length": "9000", "max_length": ""}, {"warn_length": "x"}, {"max_length": "1" * 40}],
)
def test_invalid_limits_have_an_error_on_the_form(alices_queue, client, operator, limits):
    client.force_login(operator)
    answer = client.post(f"/queues/{alices_queue.uuid}/limits/", limits)
    assert answer.status_code == 200
    assert 'class="errorlist' in answer.text
    alices_queue.refresh_from_db()
    assert (alices_queue.warn_length, alices_queue.max_length) == (None, None)


def fields_of(page):
    """Return the fields of the form on a page, as a browser would send them."""
    fields = {}
    for tag in re.findall(r"<input[^>]*>", page.text):
        given = dict(re.findall(r'([a-z]+)="([^"]*)"', tag))
        if given.get("type") == "checkbox" and "checked" not in tag:
            continue
        if given.get("type") not in ("submit", "search") and given.get("name", "_").lstrip("_") == given.get("name"):
            fields[given["name"]] = given.get("value", "on" if given["type"] == "checkbox" else "")
    return fields


def test_a_stale_limits_form_changes_only_the_edited_fields(admin, operator):
    queue = stored_queue("queue/alice/builds", ready=3, unacknowledged=1, warn_length=6, max_length=9)
    path = f"/queues/{queue.uuid}/limits/"
    form = fields_of(admin.get(path))
    assert (form["warn_length"], form["initial-warn_length"]) == ("6", "6")
    single.set_limits(queue, operator, unbounded=True, warn_length=5)
    assert admin.post(path, {**form, "max_length": "20"}).status_code == 302
    queue.refresh_from_db()
    assert (queue.unbounded, queue.warn_length, queue.max_length) == (True, 5, 20)
    form = fields_of(admin.get(path))
    assert form["unbounded"] == "on"
    del form["unbounded"]
    assert admin.post(path, {**form, "max_length": ""}).status_code == 302
    queue.refresh_from_db()
    assert (queue.unbounded, queue.warn_length, queue.max_length) == (False, 5, None)


def test_limits_that_conflict_with_a_concurrent_change_are_refused(admin, operator):
    queue = stored_queue("queue/alice/builds", ready=3, unacknowledged=1, warn_length=6, max_length=9)
    path = f"/queues/{queue.uuid}/limits/"
    form = fields_of(admin.get(path))
    single.set_limits(queue, operator, max_length=7)
    answer = admin.post(path, {**form, "warn_length": "8"})
    assert answer.status_code == 200
    assert "The warning threshold would be 8 messages and the deletion limit 7." in answer.text


# Consumers


def test_the_page_lists_consumers_with_their_prefetch_and_connection(guarded, broker, amqp, client, operator):
    amqp.queue("builds", 3)
    parameters = pika.URLParameters(f"{broker.amqp_url}/{guarded}")
    parameters.client_properties = {"connection_name": "night shift"}
    client.force_login(operator)

    def page():
        return client.get(f"/queues/{queue.uuid}/").text

    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=2)
        channel.basic_consume("builds", lambda *_: None, consumer_tag="builder-7")
        run_once()
        queue = Queue.objects.get(name="builds")
        wait_until(lambda: '<td class="number" data-label="Prefetch">2</td>' in page())
        wait_until(lambda: re.search(r'title="127\.0\.0\.1:\d+">night shift</bdi>', page()))
        assert "builder-7" in page()
