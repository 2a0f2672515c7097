import re
from datetime import timedelta

import pytest
from django.utils import timezone

from accounts.models import Owner, PulseUser
from queues.models import Queue, QueueSample, Watch
from queues.pages.queue_list import rows_of
from queues.rules.listing import WITHOUT_CONSUMER
from queues.rules.states import should_have_consumer
from tests.support.toolbox import stored_queue

pytestmark = pytest.mark.django_db


def make_queue(name="queue/alice/builds", **fields):
    return stored_queue(name, **{"ready": 3, "unacknowledged": 0, **fields})


@pytest.fixture
def visit(client, alice):
    """Return a function that opens the list as Alice."""
    Watch.objects.update_or_create(id=1, defaults={"listed_at": timezone.now()})
    client.force_login(alice)

    def get(**query):
        return client.get("/queues/", query)

    return get


def names(page):
    return re.findall(r'<th scope="row" class="grow">.*?class="cut" title="(.*?)"', page.text)


def test_a_refresh_without_a_session_reloads_the_page(client):
    answer = client.get("/queues/", headers={"HX-Request": "true"})
    assert answer["HX-Refresh"] == "true"


def test_without_a_pulse_user_the_list_says_to_create_one(visit):
    page = visit()
    assert "First you need a Pulse user on RabbitMQ." in page.text
    assert 'href="/pulse-users/"' in page.text


def test_without_a_queue_the_list_says_how_to_create_one(visit, pulse_user):
    page = visit()
    assert "No queue yet." in page.text
    assert "queue/alice/jobs" in page.text


def test_an_owner_sees_own_queues_and_an_operator_all(visit, pulse_user, client):
    make_queue(pulse_user=pulse_user)
    make_queue("queue/bob/jobs", pulse_user=PulseUser.objects.create(username="bob", ready=True))
    make_queue("celery")
    assert names(visit()) == ["queue/alice/builds"]
    client.force_login(Owner.objects.create_superuser("ops@example.org"))
    assert sorted(names(visit())) == ["celery", "queue/alice/builds", "queue/bob/jobs"]


def test_what_is_critical_comes_first_whatever_its_state(visit, pulse_user):
    make_queue("warned", pulse_user=pulse_user, ready=4_000, state="warned")
    make_queue("blocked", pulse_user=pulse_user, ready=5_000, block_reason="brake")
    make_queue("deleting", pulse_user=pulse_user, ready=6_000, state="deleting")
    make_queue("over", pulse_user=pulse_user, ready=9_000)
    make_queue("spared", pulse_user=pulse_user, ready=9_000, unbounded=True)
    make_queue("stream", pulse_user=pulse_user, ready=None, unacknowledged=None, type="stream")
    assert names(visit()) == ["over", "deleting", "blocked", "warned", "spared", "stream"]
    assert names(visit(ordering="-state")) == ["spared", "stream", "warned", "blocked", "deleting", "over"]


def test_queues_that_will_soon_be_full_come_before_those_over_their_warning_threshold(visit, pulse_user):
    now = timezone.now()
    make_queue("over", pulse_user=pulse_user, ready=9_000)
    make_queue("warned", pulse_user=pulse_user, ready=7_000, state="warned")
    make_queue("unbounded", pulse_user=pulse_user, ready=2_000, unbounded=True)
    for name, ready, state in (("later", 1_000, "ok"), ("soon", 4_000, "warned"), ("slow", 1_000, "ok")):
        queue = make_queue(name, pulse_user=pulse_user, ready=ready, state=state, consumers=1)
        queue.samples.create(at=now - timedelta(seconds=100), length=ready - (10 if name == "slow" else 900))
    page = visit()
    assert names(page)[:4] == ["over", "soon", "later", "warned"]
    assert len(re.findall("deleted in [0-9]+ min", page.text)) == 2
    Watch.objects.update(listed_at=now - timedelta(hours=1))
    assert names(visit())[:3] == ["over", "warned", "soon"]


@pytest.mark.parametrize(
    ("ordering", "order"),
    [
        ("name", "abcd"), ("-name", "dcba"), ("-length", "cabd"), ("length", "bacd"), ("-share", "bcad"),
        ("share", "acbd"), ("state", "cbad"), ("-state", "abdc"),
    ],
)  # fmt: skip
def test_the_list_can_be_sorted_with_unknown_lengths_last(visit, pulse_user, ordering, order):
    make_queue("a", pulse_user=pulse_user, ready=20)
    make_queue("b", pulse_user=pulse_user, ready=10, max_length=20, warn_length=15)
    make_queue("c", pulse_user=pulse_user, ready=3_000, state="warned")
    make_queue("d", pulse_user=pulse_user, ready=None)
    assert "".join(names(visit(ordering=ordering))) == order


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"search": "BUILD"}, ["queue/alice/builds"]),
        ({"search": "%"}, ["100%"]),
        ({"search": "'; --"}, []),
        ({"state": "warned"}, ["100%"]),
        ({"state": "gone"}, ["old"]),
        ({"vhost": "other"}, ["elsewhere"]),
        ({"vhost": "nowhere"}, []),
        ({"pulse_user": "alice"}, ["100%", "elsewhere", "queue/alice/builds"]),
        ({"pulse_user": "bob"}, []),
        ({"without_consumers": "true"}, ["100%"]),
        ({"without_consumers": "on"}, ["100%"]),
        ({"search": "u", "vhost": "/"}, ["queue/alice/builds"]),
        ({"search": "ALICE@", "vhost": "/"}, ["100%", "queue/alice/builds"]),
    ],
)
def test_the_list_can_be_filtered(visit, pulse_user, query, found):
    make_queue(pulse_user=pulse_user, consumers=2)
    make_queue("100%", pulse_user=pulse_user, state="warned", consumers=0)
    make_queue("old", pulse_user=pulse_user, state="gone", ready=None, unacknowledged=None)
    make_queue("elsewhere", pulse_user=pulse_user, vhost="other")
    page = visit(**query, ordering="name")
    assert names(page) == found
    if not found:
        assert "No queue matches." in page.text


@pytest.mark.parametrize(
    "query", [{"search": "\0"}, {"state": "nonsense"}, {"ordering": "password"}, {"page": "0"}, {"page": "x"},
              {"page": "9999999999"}, {"vhost": "\0"}]
)  # fmt: skip
def test_an_invalid_filter_is_ignored(visit, pulse_user, query):
    make_queue(pulse_user=pulse_user)
    make_queue("old", pulse_user=pulse_user, state="gone")
    page = visit(**query)
    assert page.status_code == 200
    assert names(page) == ["queue/alice/builds"]


def test_the_filter_by_pulse_user_is_a_choice_or_a_text_field(visit, pulse_user, alice):
    make_queue(pulse_user=pulse_user)
    assert 'name="pulse_user"' not in visit().text
    others = PulseUser.objects.bulk_create(PulseUser(username=f"robot-{number}", ready=True) for number in range(51))
    alice.pulse_users.add(*others[:2])
    assert '<option value="robot-1">robot-1</option>' in visit().text
    alice.pulse_users.add(*others)
    text = visit(pulse_user="alice").text
    assert '<input type="text" name="pulse_user" value="alice"' in text
    assert "robot-1" not in text


def test_the_list_starts_with_counts_by_state(visit, pulse_user):
    for number in range(3):
        make_queue(f"long {number}", pulse_user=pulse_user, state="warned", consumers=0)
    make_queue("condemned", pulse_user=pulse_user, state="deleting")
    make_queue("fine", pulse_user=pulse_user)
    make_queue("old", pulse_user=pulse_user, state="gone", consumers=None)
    text = visit().text
    assert 'aria-current="true">5 queues</a>' in text
    assert 'href="/queues/?state=warned">3 over the warning threshold</a>' in text
    assert 'href="/queues/?state=deleting">1 about to be deleted</a>' in text
    assert 'href="/queues/?without_consumers=true">3 without consumers</a>' in text
    assert 'href="/queues/?state=gone">1 gone</a>' in text


def test_the_counts_are_of_the_queues_that_a_search_finds(visit, pulse_user):
    make_queue("builds of ios", pulse_user=pulse_user, consumers=0)
    make_queue("old ios", pulse_user=pulse_user, state="gone")
    make_queue("builds of linux", pulse_user=pulse_user, state="warned", consumers=0)
    for state in ({}, {"without_consumers": "true"}):
        text = visit(search="ios", **state).text
        assert '">1 queue</a>' in text.replace(' aria-current="true"', "")
        assert ">1 without consumers</a>" in text
        assert ">1 gone</a>" in text
        assert "over the warning threshold" not in text


def test_a_search_counts_the_gone_queues_that_it_leaves_out(visit, pulse_user):
    make_queue(pulse_user=pulse_user)
    make_queue("builds of old", pulse_user=pulse_user, state="gone")
    page = visit(search="builds")
    assert names(page) == ["queue/alice/builds"]
    query = "/queues/?search=builds&amp;state=gone"
    for one in (page, visit(search="builds", blocked="true")):
        assert f'href="{query}">1 deleted queue matches</a>' in one.text
    assert names(visit(search="builds", state="gone")) == ["builds of old"]


@pytest.mark.parametrize(
    ("fields", "healthy"),
    [
        ({"consumers": 0, "ready": 0}, True),
        ({"consumers": 0}, False),
        ({"consumers": 0, "ready": 0, "unacknowledged": 1}, False),
        ({"consumers": 0, "name": "builds.parked"}, True),
        ({"consumers": None}, True),
        ({"consumers": 1, "stalled_notified_at": timezone.now()}, False),
        ({"block_reason": "brake"}, False),
        ({"state": "warned"}, False),
        ({"ready": 4_000, "before": 3_000}, False),
    ],
)
def test_all_pages_agree_which_queues_are_healthy(visit, client, operator, pulse_user, fields, healthy):
    given = {"pulse_user": pulse_user, "consumers": 1, **fields}
    before = given.pop("before", given.get("ready", 3))
    make_queue(**given).samples.create(at=timezone.now() - timedelta(seconds=100), length=before)
    verdict = "1 queue, healthy" if healthy else "1 of 1 queue needs attention"
    row = re.search('<th scope="row" class="grow">.*?<span class="mark (.*?)">', visit().text)
    assert (row[1] == "normal") is healthy
    assert f"<h1>{verdict}</h1>" in client.get("/").text
    assert (client.get("/api/queues/").json()[0]["severity"] == "normal") is healthy
    client.force_login(operator)
    assert f"<p>{verdict}" in client.get("/admin/").text
    (row,) = rows_of(Queue.objects.all(), timezone.now())
    assert row.state.needs_attention is not healthy
    assert (row.state.word == "healthy") is healthy


def test_a_row_has_state_length_size_and_bar(visit, pulse_user):
    facts = {"consumers": 0, "bytes": 3_500_000, "max_length": 5_000}
    make_queue(pulse_user=pulse_user, ready=2_000, unacknowledged=500, state="warned", **facts)
    text = visit().text
    assert '<td class="wide number">3.3\N{NO-BREAK SPACE}MB</td>' in text
    assert '<span class="state word warning">over threshold</span>' in text
    assert '<span class="number">2,500</span>' in text
    assert 'aria-label="warning threshold 2,000; deletion limit 5,000"' in text
    assert '<rect width="50.0%"' in text
    assert 'x1="40.0%"' in text
    assert "style=" not in text


def test_a_gone_queue_has_no_bar_and_cannot_be_selected(visit, pulse_user):
    make_queue(pulse_user=pulse_user, ready=9_000, state="gone", consumers=None)
    text = visit(state="gone").text
    assert '<span class="faint">none</span>' in text
    assert 'type="checkbox" name="uuid"' not in text
    assert "Purge…" not in text


def test_names_are_escaped(visit, pulse_user):
    make_queue("queue/alice/<script>\u202e'\"\x07", pulse_user=pulse_user)
    make_queue("\N{PILE OF POO}" * 63 + "abc", pulse_user=pulse_user, ready=0)
    assert names(visit()) == [
        "queue/alice/&lt;script&gt;\\u202e&#x27;&quot;\\x07",
        "\N{PILE OF POO}" * 63 + "abc",
    ]


def test_the_vhost_is_shown_if_there_are_several(visit, pulse_user):
    make_queue(pulse_user=pulse_user)
    assert 'title="/"' not in visit().text
    make_queue(pulse_user=pulse_user, vhost="other")
    assert 'title="other">in other</span>' in visit().text


def test_pages_of_fifty_queues_keep_the_filters(visit, pulse_user):
    for number in range(120):
        make_queue(f"jobs {number:03}", pulse_user=pulse_user)
    make_queue("other", pulse_user=pulse_user)
    page = visit(search="jobs", ordering="-name", page=2)
    assert names(page) == [f"jobs {number:03}" for number in range(69, 19, -1)]
    assert "51 to 100 of 120; page 2 of 3" in page.text
    assert 'rel="prev" href="/queues/?search=jobs&amp;ordering=-name&amp;page=1"' in page.text
    assert 'rel="next" href="/queues/?search=jobs&amp;ordering=-name&amp;page=3"' in page.text
    assert "101 to 121 of 121" in visit(page=3).text


def test_the_pages_of_two_hundred_queues_are_small(visit, client, pulse_user):
    now = timezone.now()
    for number in range(200):
        queue = make_queue(f"queue/alice/{'release-' * 5}{number}", pulse_user=pulse_user, ready=number, state="warned")
        queue.samples.bulk_create(
            QueueSample(queue=queue, at=now - timedelta(minutes=minute), length=number * minute % 977)
            for minute in range(60)
        )
    sizes = {path: len(client.get(path, headers={"Accept-Encoding": "gzip"}).content) for path in ("/", "/queues/")}
    assert max(sizes.values()) < 80_000, sizes  # and 70 kB of styles and scripts


def test_a_refresh_returns_the_rows_of_the_same_list_without_the_page_around_it(visit, pulse_user, client):
    queue = make_queue(pulse_user=pulse_user)
    make_queue("other", pulse_user=pulse_user)
    address = "/queues/?search=builds&amp;ordering=name"
    assert f'id="live" hx-get="{address}"' in visit(search="builds", ordering="name").text
    Queue.objects.filter(id=queue.id).update(ready=2_345, state="warned")
    page = client.get(address.replace("&amp;", "&"), headers={"HX-Request": "true"})
    assert names(page) == ["queue/alice/builds"]
    assert f'<tr id="{queue.uuid.hex}">' in page.text
    assert "2,345" in page.text
    assert "1 over the warning threshold" in page.text
    for what in ("<html", "<h1", 'role="search"'):
        assert what not in page.text


@pytest.mark.parametrize(("poll", "age", "noted"), [(5, 50, False), (5, 70, True), (30, 80, False), (30, 100, True)])
def test_outdated_figures_are_marked(visit, pulse_user, settings, poll, age, noted):
    make_queue(pulse_user=pulse_user)
    settings.GUARDIAN_POLL_SECONDS = poll
    since = timezone.now() - timedelta(seconds=age)
    Watch.objects.update(listed_at=since)
    text = visit().text
    assert ("Guardian has not listed the queues since" in text) is noted
    Watch.objects.update(outage_since=since)
    assert ("the broker does not answer" in visit().text) is noted


@pytest.fixture
def agents_queue(alice, pulse_user):
    """Give a queue of Alice's agents; Alice has a Pulse user too."""
    return make_queue("consumer_1", vhost=alice.uuid.hex, owner=alice, registered=True, consumers=0)


def test_queues_of_agents_are_on_their_owners_list(visit, agents_queue, alice, pulse_user):
    pulse_user.owners.add(Owner.objects.create_user("bob@example.org"))
    make_queue("consumer_2", vhost=alice.uuid.hex, owner=alice)
    make_queue("consumer_3", vhost="other", owner=Owner.objects.create_user("carol@example.org"), registered=True)
    make_queue(pulse_user=pulse_user)
    page = visit()
    assert sorted(names(page)) == ["consumer_1", "consumer_2", "queue/alice/builds"]
    assert "agents of alice@example.org" in page.text
    assert "not registered by agents of alice@example.org" in page.text


def test_the_dead_letter_queue_needs_no_consumer(visit, agents_queue, alice):
    make_queue("guardian.dlq", vhost=alice.uuid.hex, owner=alice, registered=True, consumers=0)
    page = visit()
    assert "1 without consumers" in page.text
    assert names(visit(without_consumers="true")) == ["consumer_1"]


def test_parking_and_retry_queues_need_no_consumer(visit, alice, pulse_user):
    lonely = ["shop.parked.here", "shop.PARKED", "shop.retry.soon", "shop.retry.5s\n", "parked", "guardian.dlq"]
    for name in [*lonely, "shop.parked", "shop.retry.10s", "shop.retry.250ms"]:
        make_queue(name, pulse_user=pulse_user, consumers=0)
    make_queue("reply", pulse_user=pulse_user, consumers=0, exclusive=True)
    shown = [name.replace("\n", "\\x0a") for name in lonely]
    assert sorted(names(visit(without_consumers="true"))) == sorted(shown)
    page = visit()
    assert f"{len(lonely)} without consumers" in page.text
    assert {queue.name for queue in Queue.objects.filter(WITHOUT_CONSUMER)} == {
        queue.name
        for queue in Queue.objects.all()
        if should_have_consumer(queue.name, exclusive=queue.exclusive, registered=queue.registered)
    }
