"""The comparison of a list with the stored rows: properties that hold for any history."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.rules.comparison import Observation, compare
from queues.rules.quiet import MessageKind
from queues.rules.rows import (
    NO_REGISTRATIONS,
    Earlier,
    Registrations,
    Rules,
    StoredPulseUser,
    StoredQueue,
    with_exact_lengths,
)
from queues.rules.thresholds import DELETING, GONE, OK, WARNED, MemoryPressure, Static, Thresholds
from rabbit.amqp import DeclareOk
from rabbit.memory import NodeMemory
from rabbit.snapshot import MQTT_QOS_0, ListedQueue, Snapshot

START = datetime(2026, 1, 1, tzinfo=UTC)
NODES = frozenset({"rabbit@one"})
RULES = Rules(Static(Thresholds(5, 10)), "/", None, re.compile("^keep-"), "report", 50, 900)
ALICE = {"alice": StoredPulseUser(1, None, None)}


def listed_queue(name, length, **fields):
    ready = None if length is None else length
    return ListedQueue("/", name, "classic", True, False, False, "rabbit@one", ready, 0)._replace(**fields)


def snapshot(*queues, **fields):
    return Snapshot(list(queues), {}, NODES, frozenset(), True, True, [], [], 0.1)._replace(**fields)


class InMemoryMonitor:
    """A monitor without a database: each pass starts with the rows of the one before."""

    def __init__(self, rules=RULES, pulse_users=ALICE, agents=NO_REGISTRATIONS):
        self.rules, self.pulse_users, self.agents = rules, pulse_users, agents
        self.rows = {}
        self.earlier = Earlier(NODES, 0)
        self.now = START

    def run(self, shot, *, seconds=5, force=False, rules_before=None, **fields):
        """Run one pass, store its rows, and return its changes. ``rules_before`` are earlier rules that differ."""
        self.now += timedelta(seconds=seconds)
        known = {key: row for key, row in self.rows.items() if row.state != GONE or key in {q[:2] for q in shot.queues}}
        earlier = self.earlier._replace(rules=rules_before)
        observation = Observation(shot, known, self.pulse_users, self.agents, earlier, **fields)
        changes = compare(observation, self.rules, now=self.now, force=force)
        written = [*changes.new, *changes.changed, *changes.lengths, *changes.missed, *changes.gone]
        for number, row in enumerate(written, start=len(self.rows) + 1):
            self.rows[row.vhost, row.name] = row if row.id is not None else row._replace(id=number)
        self.earlier = Earlier(shot.nodes if shot.nodes_unchanged else frozenset(), changes.short_lists)
        return changes

    def after(self, shot, **options):
        """Run one pass, and return this monitor."""
        self.run(shot, **options)
        return self

    def row(self, name):
        return self.rows["/", name]


lengths = st.one_of(st.none(), st.integers(0, 10))
any_length = st.one_of(st.none(), st.integers(0, 30))
names = st.sampled_from(["queue/alice/a", "queue/alice/b", "stray", "keep-me", "exchange/alice/x", "amq.gen-1"])


@given(st.lists(lengths, max_size=40), st.integers(1, 1000))
def test_the_last_notification_about_a_queue_is_true_after_any_history(history, seconds):
    monitor, said = InMemoryMonitor(), OK
    for length in history:
        changes = monitor.run(snapshot(listed_queue("queue/alice/a", length)), seconds=seconds)
        for message in changes.messages:
            said = message.queue.state
    settled_at = next((length for length in reversed(history) if length is not None), 0)
    for message in monitor.run(snapshot(listed_queue("queue/alice/a", settled_at)), seconds=901).messages:
        said = message.queue.state
    assert said == monitor.row("queue/alice/a").state == (WARNED if settled_at >= 5 else OK)


@given(st.lists(st.tuples(names, any_length), max_size=20))
def test_only_queues_with_an_owner_are_notified_to_an_owner(history):
    monitor = InMemoryMonitor()
    for name, length in history:
        for message in monitor.run(snapshot(listed_queue(name, length))).messages:
            owned = message.queue.name.startswith("queue/alice/")
            assert (message.queue.pulse_user_id is not None) == owned


@given(
    st.lists(st.dictionaries(names, any_length), max_size=10),
    st.sampled_from(["unbounded", "exclusive", "registered", "ignored", "unknown"]),
    st.sampled_from(["report", "delete-misnamed", "delete-unpatterned"]),
    st.booleans(),
)
def test_exempt_queues_are_never_deletable_for_their_length(history, why, policy, force):
    ignored = re.compile("") if why == "ignored" else None
    monitor = InMemoryMonitor(replace(RULES, ignored=ignored, namespace_policy=policy))
    for queues in history:
        shot = snapshot(
            *(
                listed_queue(name, None if why == "unknown" else length, exclusive=why == "exclusive")
                for name, length in queues.items()
            )
        )
        for key, row in monitor.rows.items():
            monitor.rows[key] = row._replace(unbounded=why == "unbounded")
        if why == "registered":
            monitor.agents = Registrations(queues={("/", name): 7 for name in queues})
        new = {name for name in queues if ("/", name) not in monitor.rows}
        for one in monitor.run(shot, force=force).deletable:
            # Operators set the flag, so a new queue does not have it yet.
            first_time = why == "unbounded" and one.queue.name in new
            assert first_time or (one.for_its_name and why == "unknown")


@given(st.lists(st.sets(names), max_size=8))
def test_a_queue_is_gone_only_after_two_lists_in_a_row_lack_it(history):
    monitor, before = InMemoryMonitor(), [set(), set()]
    for there in history:
        gone = {row.name for row in monitor.run(snapshot(*(listed_queue(name, 0) for name in there))).gone}
        assert not gone & (there | before[-1])
        before.append(there)


def test_lists_from_different_nodes_do_not_add_up():
    monitor = InMemoryMonitor().after(snapshot(*short_queues(3)))
    monitor.run(snapshot(*short_queues(2)))
    monitor.rows["/", "q1"] = monitor.row("q1")._replace(state=DELETING, delete_sent_at=START)
    other = NODES | {"rabbit@two"}
    first, second = (monitor.run(snapshot(*short_queues(1), nodes=other)) for _ in range(2))
    assert (first.gone, first.deleted) == ([], [])
    assert [[row.name for row in rows] for rows in (second.gone, second.deleted)] == [["q2"], ["q1"]]


@pytest.mark.parametrize(
    ("fields", "observed"),
    [
        ({"nodes_unchanged": False}, {}),
        ({"down": frozenset({"rabbit@two"})}, {}),
        ({"unlisted": {"other": "refused"}}, {}),
        ({}, {"stopped_vhosts": frozenset({"other"})}),
    ],
    ids=["nodes change", "stopped node", "unlisted vhost", "stopped vhost"],
)
def test_a_queue_that_may_exist_is_not_missing(fields, observed):
    monitor = InMemoryMonitor()
    missing = listed_queue("b", 0, vhost="other", node="rabbit@two")
    monitor.run(snapshot(listed_queue("a", 0), missing, nodes=NODES | {"rabbit@two"}))
    for _ in range(5):
        assert not monitor.run(snapshot(listed_queue("a", 0), **fields), **observed).gone
    assert (monitor.rows["other", "b"].state, monitor.rows["other", "b"].misses) == (OK, 0)


def test_a_queue_on_a_removed_node_is_gone():
    monitor = InMemoryMonitor()
    nodes = NODES | {"rabbit@two"}
    monitor.run(snapshot(listed_queue("a", 0), listed_queue("b", 0, node="rabbit@two"), nodes=nodes))
    assert [len(monitor.run(snapshot(listed_queue("a", 0))).gone) for _ in range(2)] == [0, 1]


def test_while_a_node_is_down_only_classic_queues_are_missing():
    monitor = InMemoryMonitor()
    types = ("classic", "quorum", "stream")
    monitor.run(snapshot(listed_queue("a", 0), *(listed_queue(type_, 0, type=type_) for type_ in types)))
    degraded = snapshot(listed_queue("a", 0), down=frozenset({"rabbit@two"}))
    gone = [row.name for _ in range(3) for row in monitor.run(degraded).gone]
    assert gone == ["classic"]


def test_a_row_without_a_type_keeps_the_stored_type():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", 1, type="quorum")))
    monitor.run(snapshot(listed_queue("a", 2, type="unknown")))
    assert (monitor.row("a").type, monitor.row("a").length) == ("quorum", 2)


def test_a_queue_that_was_gone_may_have_another_type():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", 1, type="stream"), listed_queue("b", 1)))
    for _ in range(2):
        monitor.run(snapshot(listed_queue("b", 1)))
    monitor.run(snapshot(listed_queue("a", 1, type="unknown"), listed_queue("b", 1)))
    assert monitor.row("a").type == "unknown"


def test_a_stream_without_a_type_is_not_deleted_for_its_length():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", None, type="stream")))
    changes = monitor.run(snapshot(listed_queue("a", 11, type="unknown")))
    assert (changes.deletable, monitor.row("a").length) == ([], None)


def test_an_mqtt_subscription_without_a_type_is_not_deleted_for_its_name():
    monitor = InMemoryMonitor(replace(RULES, namespace_policy="delete-unpatterned"))
    monitor.run(snapshot(listed_queue("a", None, type=MQTT_QOS_0, exclusive=True)))
    changes = monitor.run(snapshot(listed_queue("a", None, type="unknown")))
    assert (changes.deletable, monitor.row("a").exclusive) == ([], True)


def short_queues(count, **fields):
    return [listed_queue(f"q{number}", 0, **fields) for number in range(count)]


def test_a_much_shorter_list_must_repeat_three_times_on_the_same_nodes_and_deletes_nothing_meanwhile():
    monitor = InMemoryMonitor().after(snapshot(*short_queues(300)))
    half = snapshot(listed_queue("q0", 11), *short_queues(150)[1:])
    shots = [half._replace(nodes=NODES | {"rabbit@two"})] * 2 + [half] * 3
    changes = [monitor.run(shot) for shot in shots]
    assert [(len(one.gone), len(one.deletable)) for one in changes] == [(0, 0)] * 4 + [(150, 1)]
    assert len(monitor.run(snapshot(*short_queues(1)), force=True).gone) == 149


def test_an_empty_list_must_repeat_three_times_even_for_one_queue():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", 0)))
    assert [len(monitor.run(snapshot()).gone) for _ in range(3)] == [0, 0, 1]


def test_a_complete_list_resets_the_count_of_short_lists():
    monitor = InMemoryMonitor().after(snapshot(*short_queues(300)))
    for shot in (short_queues(150), short_queues(150), short_queues(300), short_queues(150), short_queues(150)):
        assert not monitor.run(snapshot(*shot)).gone


def test_queues_deleted_by_guardian_do_not_make_a_list_short():
    monitor = InMemoryMonitor().after(snapshot(*short_queues(300)))
    for key in list(monitor.rows)[:200]:
        monitor.rows[key] = monitor.rows[key]._replace(state=DELETING, delete_sent_at=START)
    looks = [monitor.run(snapshot(*short_queues(300)[200:])) for _ in range(2)]
    assert [(one.short, len(one.deleted)) for one in looks] == [(0, 0), (0, 200)]


def queues_of_alice(count, **fields):
    return [listed_queue(f"queue/alice/{number}", 0, **fields) for number in range(count)]


@pytest.mark.parametrize("pulse_users", [{"alice": StoredPulseUser(1, None, None, removing=True)}, {}])
@pytest.mark.parametrize("left", [[], [listed_queue("a", 11)]])
def test_queues_of_a_removed_pulse_user_do_not_make_a_list_short(pulse_users, left):
    monitor = InMemoryMonitor().after(snapshot(*queues_of_alice(300), *left))
    monitor.pulse_users = pulse_users
    looks = [monitor.run(snapshot(*left)) for _ in range(2)]
    assert [(one_pass.short, len(one_pass.gone)) for one_pass in looks] == [(0, 0), (0, 300)]


def test_other_missing_queues_beside_a_removed_pulse_user_make_a_list_short():
    monitor = InMemoryMonitor().after(snapshot(*short_queues(300), *queues_of_alice(100)))
    monitor.pulse_users = {"alice": StoredPulseUser(1, None, None, removing=True)}
    changes = monitor.run(snapshot(*short_queues(100)))
    assert (changes.short, changes.gone) == (200, [])


AGENTS = "5f" * 16
BOB = 7


def of_agents(*names, registered=(), leaving=()):
    """Return the registrations of Bob's agents and their queues as listed."""
    agents = Registrations(
        {(AGENTS, name): BOB for name in registered}, {AGENTS: BOB}, {(AGENTS, name) for name in leaving}
    )
    return agents, [listed_queue(name, 0, vhost=AGENTS) for name in names]


@pytest.mark.parametrize("name", ["consumer_1", "guardian.dlq", "queue/alice/x", "amq.gen-1"])
def test_queues_in_an_agents_vhost_belong_to_its_owner(name):
    agents, queues = of_agents(name, "consumer_2", registered=[name])
    monitor = InMemoryMonitor(agents=agents)
    changes = monitor.run(snapshot(*queues))
    facts = {row.name: (row.registered, row.owner_id, row.pulse_user_id) for row in monitor.rows.values()}
    assert facts == {name: (True, BOB, None), "consumer_2": (False, BOB, None)}
    assert (changes.misnamed, changes.unpatterned) == ([], 0)


def test_a_registered_queue_vanishes_after_two_lists():
    agents, queues = of_agents("consumer_1", "consumer_2", registered=["consumer_1"])
    monitor = InMemoryMonitor(agents=agents).after(snapshot(*queues, listed_queue("a", 0)))
    looks = [monitor.run(snapshot(listed_queue("a", 0))) for _ in range(2)]
    assert [[row.name for row in one_pass.vanished] for one_pass in looks] == [[], ["consumer_1"]]


def test_a_registered_queue_no_longer_guarded_has_not_vanished():
    agents, queues = of_agents("consumer_1", registered=["consumer_1"])
    monitor = InMemoryMonitor(agents=agents).after(snapshot(*queues, listed_queue("a", 0)))
    monitor.rules = replace(RULES, vhosts=frozenset({"/"}))
    changes = monitor.run(snapshot(*queues, listed_queue("a", 0)))
    assert ([row.name for row in changes.gone], changes.vanished) == (["consumer_1"], [])


def test_queues_that_lost_their_registration_do_not_make_a_list_short():
    names = [f"consumer_{number}" for number in range(300)]
    agents, queues = of_agents(*names, registered=names)
    monitor = InMemoryMonitor(agents=agents).after(snapshot(*queues, listed_queue("a", 0)))
    monitor.agents, _ = of_agents()
    looks = [monitor.run(snapshot(listed_queue("a", 0))) for _ in range(2)]
    assert [(one_pass.short, len(one_pass.gone), one_pass.vanished) for one_pass in looks] == [(0, 0, []), (0, 300, [])]


@pytest.mark.parametrize(("leaving", "short"), [(250, 0), (100, 150)])
def test_orphans_being_removed_do_not_make_a_list_short(leaving, short):
    names = [f"consumer_{number}" for number in range(300)]
    agents, queues = of_agents(*names, leaving=names[:leaving])
    monitor = InMemoryMonitor(agents=agents).after(snapshot(*queues))
    assert monitor.run(snapshot(*queues[250:])).short == short


def test_missing_registered_queues_make_a_list_short():
    names = [f"consumer_{number}" for number in range(300)]
    agents, queues = of_agents(*names, registered=names)
    monitor = InMemoryMonitor(agents=agents).after(snapshot(*queues))
    changes = monitor.run(snapshot(*queues[200:]))
    assert (changes.short, changes.gone, changes.vanished) == (200, [], [])


@pytest.mark.parametrize("length", [0, 11, None])
def test_of_a_queue_that_is_the_deleters_only_the_length_is_recorded(length):
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", 12)))
    before = monitor.row("a")
    changes = monitor.run(snapshot(listed_queue("a", length, node="rabbit@two")))
    assert (changes.messages, changes.deletable, changes.events, changes.changed) == ([], [], [], [])
    assert monitor.row("a") == before._replace(ready=length)


def test_past_the_brake_no_queue_is_deletable_and_all_are_warned_about():
    monitor = InMemoryMonitor(replace(RULES, brake=2))
    changes = monitor.run(snapshot(listed_queue("a", 11), listed_queue("b", 11), listed_queue("c", 11)))
    assert (changes.deletable, len(changes.blocked)) == ([], 3)
    assert [message.kind for message in changes.messages] == [MessageKind.WARNING] * 3


def test_a_blocked_queue_that_was_warned_about_is_notified_once_more_and_then_as_usual():
    monitor = InMemoryMonitor(replace(RULES, brake=0))

    def messages(length, **options):
        return [message.kind for message in monitor.run(snapshot(listed_queue("a", length)), **options).messages]

    assert [messages(length) for length in (6, 11, 12)] == [[MessageKind.WARNING], [MessageKind.WARNING], []]
    assert [messages(length) for length in (1, 11, 12)] == [[MessageKind.RECOVERY], [], []]
    assert messages(12, seconds=901) == [MessageKind.SUMMARY]
    assert messages(12, seconds=901) == []


NOTHING_GUARDED = replace(RULES, vhosts=frozenset())
"""The rules before the first pass over a broker."""


def with_limits(warn, limit, **fields):
    return replace(RULES, policy=Static(Thresholds(warn, limit)), **fields)


@given(
    st.lists(st.dictionaries(names, any_length), min_size=1, max_size=4),
    st.sampled_from([RULES, NOTHING_GUARDED, with_limits(5, 20), with_limits(3, 8), replace(RULES, ignored=None)]),
    st.sampled_from(["report", "delete-misnamed", "delete-unpatterned"]),
)
def test_a_change_of_the_settings_deletes_no_queue_that_the_earlier_ones_allowed(history, before, policy):
    monitor = InMemoryMonitor(replace(RULES, namespace_policy=policy))
    queues = [listed_queue(name, length) for name, length in history[0].items()]
    would_be_deletable = {one.key for one in InMemoryMonitor(before).run(snapshot(*queues)).deletable}
    changes = monitor.run(snapshot(*queues), rules_before=before)
    assert {one.key for one in changes.deletable} <= would_be_deletable
    blocked = {one.key for one in changes.blocked}
    for there in history[1:]:
        changes = monitor.run(snapshot(*(listed_queue(name, length) for name, length in there.items())))
        assert blocked.isdisjoint(one.key for one in changes.deletable)
        blocked = {key for key in blocked if monitor.rows[key].block_reason}


def test_a_queue_of_unknown_length_when_the_settings_change_is_blocked():
    monitor = InMemoryMonitor()
    changes = monitor.run(snapshot(listed_queue("a", None)), rules_before=NOTHING_GUARDED)
    assert (changes.deletable, changes.blocked) == ([], [])
    changes = monitor.run(snapshot(listed_queue("a", 11)))
    assert (changes.deletable, len(changes.blocked)) == ([], 1)


def test_a_queue_of_unknown_length_that_turns_out_to_be_short_is_not_blocked():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", None)), rules_before=NOTHING_GUARDED)
    monitor.run(snapshot(listed_queue("a", 1)))
    assert len(monitor.run(snapshot(listed_queue("a", 11))).deletable) == 1


def test_a_stream_is_not_blocked():
    monitor = InMemoryMonitor().after(snapshot(listed_queue("a", None, type="stream")), rules_before=NOTHING_GUARDED)
    assert monitor.row("a").block_reason == ""


def test_a_queue_in_a_list_that_is_too_short_is_blocked_when_the_settings_change():
    monitor = InMemoryMonitor(replace(RULES, brake=0)).after(snapshot(listed_queue("a", 8), *short_queues(3)))
    monitor.rules = with_limits(5, 7, brake=0)
    changes = monitor.run(snapshot(listed_queue("a", 8)), rules_before=RULES)
    assert (changes.short, changes.deletable) == (3, [])
    changes = monitor.run(snapshot(listed_queue("a", 8), *short_queues(3)))
    assert (changes.deletable, len(changes.blocked)) == ([], 1)


def test_a_queue_over_its_limit_with_unacknowledged_messages_is_blocked_when_the_settings_change():
    monitor = InMemoryMonitor()
    queue = listed_queue("a", 4, type="quorum", unacknowledged=8)
    monitor.run(snapshot(queue), rules_before=NOTHING_GUARDED)
    for _ in range(4):
        changes = monitor.run(snapshot(queue))
        assert changes.deletable == []
    assert len(changes.blocked) == 1


def test_a_policy_that_lowers_limits_under_memory_pressure_is_a_change_and_the_pressure_is_none():
    queue = listed_queue("a", 8)
    pressure = {"memory": {"rabbit@one": NodeMemory(1000, 1000)}, "held": {("/", "a"): 500}}
    monitor = InMemoryMonitor(replace(RULES, policy=MemoryPressure(Thresholds(5, 10))))
    changes = monitor.run(snapshot(queue), rules_before=RULES, **pressure)
    assert (changes.deletable, len(changes.blocked)) == ([], 1)
    monitor = InMemoryMonitor(replace(RULES, policy=MemoryPressure(Thresholds(5, 10)))).after(snapshot(queue))
    assert len(monitor.run(snapshot(queue), **pressure).deletable) == 1


def test_a_queue_in_another_vhost_has_no_owner_and_no_namespace():
    monitor = InMemoryMonitor(replace(RULES, namespace_policy="delete-unpatterned"))
    changes = monitor.run(
        snapshot(listed_queue("queue/alice/a", 0, vhost="other"), listed_queue("stray", 0, vhost="other"))
    )
    assert not changes.deletable
    assert monitor.rows["other", "queue/alice/a"].pulse_user_id is None


class TestOutdatedLengths:
    """Quorum queues are listed as of their last tick; only their ready count can be queried."""

    def test_a_queue_over_the_limit_only_with_unacked_messages_is_deletable_after_12_s(self):
        monitor = InMemoryMonitor()
        held = listed_queue("queue/alice/a", 3, type="quorum", unacknowledged=40)
        changes = [monitor.run(snapshot(held), seconds=4) for _ in range(4)]
        assert [len(one.deletable) for one in changes] == [0, 0, 0, 1]
        assert [message.kind for one in changes for message in one.messages] == [MessageKind.WARNING]

    @pytest.mark.parametrize("other", [3, 11, None])
    def test_a_list_with_another_length_restarts_the_12_s(self, other):
        monitor = InMemoryMonitor()
        held = listed_queue("queue/alice/a", 3, type="quorum", unacknowledged=40)
        monitor.run(snapshot(held), seconds=8)
        monitor.run(snapshot(listed_queue("queue/alice/a", other, type="quorum")), seconds=8)
        monitor.earlier = monitor.earlier._replace(recovered=NODES)  # otherwise the next length is unknown, too
        assert not monitor.run(snapshot(held), seconds=8).deletable

    def test_only_deletions_and_recoveries_need_a_confirmed_length(self):
        monitor = InMemoryMonitor()
        quorum = partial(listed_queue, type="quorum")
        names = ["long", "short", "calm"]
        monitor.run(snapshot(*map(quorum, names, (5, 6, 1))))
        changes = monitor.run(snapshot(*map(quorum, names, (11, 2, 5))))
        assert changes.unconfirmed == [("/", "long"), ("/", "short")]

    @pytest.mark.parametrize(
        ("listed", "depth", "length"),
        [
            ((40, 0), DeclareOk(0, 0), 40),  # purged, or taken by a consumer that has not acknowledged them
            ((40, 0), DeclareOk(3, 0), 40),
            ((0, 0), DeclareOk(40, 0), 40),  # a new leader
            ((0, 40), DeclareOk(40, 0), 40),  # requeued, so not 80
            ((0, 40), DeclareOk(0, 1), 40),
            ((40, 0), None, 40),  # not shorter than before: trust the list
            ((20, 15), None, 35),  # not shorter than before including unacknowledged messages
            ((1, 0), None, None),  # shorter than before and unconfirmed
        ],
    )
    def test_the_ready_count_of_a_passive_declare_replaces_the_listed_one(self, listed, depth, length):
        ready, unacknowledged = listed
        shot = snapshot(
            listed_queue("queue/alice/a", ready, type="quorum", unacknowledged=unacknowledged), listed_queue("other", 3)
        )
        known = {("/", "queue/alice/a"): StoredQueue(None, *listed_queue("queue/alice/a", 30, type="quorum"))}
        key = ("/", "queue/alice/a")
        corrected = with_exact_lengths(shot, {key}, {key: depth} if depth else {}, known)
        assert [queue.length for queue in corrected.queues] == [length, 3]
