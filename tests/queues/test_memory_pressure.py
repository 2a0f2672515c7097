"""The policy memory-pressure: the queues that hold the most memory of a node are deleted earlier."""

from datetime import timedelta

import pytest
from django.utils import timezone

from queues.guard import once
from queues.models import Watch
from queues.rules import thresholds
from queues.rules.rows import Registrations, Rules, StoredPulseUser
from queues.rules.thresholds import MemoryPressure, Thresholds
from rabbit import memory
from rabbit.errors import BrokerUnavailable
from rabbit.memory import NodeMemory
from tests.queues.test_comparison import InMemoryMonitor, listed_queue, snapshot
from tests.support.counting import counted_requests
from tests.support.toolbox import broker_version, queue_names, raising, wait_until

MIB = 2**20
FULL = {"rabbit@one": NodeMemory(1000 * MIB, 1000 * MIB)}
RULES = Rules(MemoryPressure(Thresholds(5, 100)), "/", None, None, "report", 50, 900)


def deletable(queues, *, nodes=FULL, pulse_users=None, agents=None, rows=None):
    """Return the names of the deletable ones of these queues, given by name with their messages and bytes in memory."""
    agents = agents or Registrations()
    passes = InMemoryMonitor(
        RULES, {"alice": StoredPulseUser(1, None, None)} if pulse_users is None else pulse_users, agents
    )
    listing = snapshot(*(listed_queue(name, messages) for name, (messages, _) in queues.items()))
    passes.run(listing)
    for name, changed in (rows or {}).items():
        passes.rows["/", name] = passes.row(name)._replace(**changed)
    held = {("/", name): size for name, (_, size) in queues.items()}
    changes = passes.run(listing, memory=nodes, held=held)
    names = {one.queue.name for one in changes.deletable}
    assert {name for _, name in changes.for_memory} == names
    return names


def test_the_queue_that_holds_the_memory_is_deletable_and_not_the_longest():
    assert deletable({"heavy": (40, 160 * MIB), "light": (90, MIB)}) == {"heavy"}


def test_a_queue_within_its_warning_threshold_stays_and_others_relieve_the_node():
    assert deletable({"short": (5, 500 * MIB), "long": (50, 100 * MIB)}) == {"long"}


@pytest.mark.parametrize(
    "exempt",
    [
        {"rows": {"queue/alice/a": {"unbounded": True}}},
        {"rows": {"queue/alice/a": {"max_length": 1000}}},
        {"pulse_users": {"alice": StoredPulseUser(1, None, 1000)}},
        {"agents": Registrations(queues={("/", "queue/alice/a"): 7})},
    ],
    ids=["unbounded", "own limit", "limit of its Pulse user", "registered"],
)
def test_a_queue_that_the_policy_does_not_limit_stays_and_others_relieve_the_node(exempt):
    assert deletable({"queue/alice/a": (50, 500 * MIB), "other": (50, 100 * MIB)}, **exempt) == {"other"}


def test_only_queues_on_the_node_under_pressure_are_deletable():
    nodes = {"rabbit@one": NodeMemory(700 * MIB, 1000 * MIB), "rabbit@two": NodeMemory(1000 * MIB, 1000 * MIB)}
    assert deletable({"heavy": (50, 500 * MIB)}, nodes=nodes) == set()


@pytest.fixture
def under_pressure(guarded, settings, monkeypatch, management):
    """Select the policy, and have it consider any use of memory as pressure."""
    settings.GUARDIAN_THRESHOLD_POLICY = "memory-pressure"
    settings.GUARDIAN_MAX_QUEUE_LENGTH = 80
    monkeypatch.setattr(MemoryPressure, "PRESSURE_START", 0.0)
    monkeypatch.setattr(thresholds, "MIN_RELIEF", 0.001)
    wait_until(lambda: memory.of_nodes(management))  # a new node reports it after some seconds


def test_the_largest_queue_in_memory_is_deleted_and_one_of_tiny_messages_stays(
    amqp, guarded, under_pressure, management
):
    if broker_version(management) >= (4, 0):
        pytest.skip("RabbitMQ 4 stores nearly all messages on disk, so no queue of a test holds much memory")
    amqp.queue("light", 80)
    amqp.queue("heavy")
    for _ in range(80):
        amqp.channel.basic_publish("", "heavy", b"x" * MIB)
    wait_until(lambda: memory.of_queues(management, [guarded]).get((guarded, "heavy"), 0) >= 80 * MIB)
    assert once.run_once().deleted == 1
    assert queue_names(management, guarded) == {"light"}


def test_pressure_costs_one_request_and_none_for_half_a_minute_after_a_deletion(amqp, guarded, under_pressure):
    amqp.queue("short")
    costs = []
    for seconds_ago in (None, 20, 40):
        relieved_at = timezone.now() - timedelta(seconds=seconds_ago) if seconds_ago else None
        Watch.objects.update_or_create(id=1, defaults={"relieved_at": relieved_at})
        with counted_requests() as requests:
            once.run_once()
        costs.append(requests.count(f"GET /api/queues/{guarded}"))
    assert costs == [2, 1, 2]


def test_a_pass_goes_on_if_the_memory_of_queues_cannot_be_listed(amqp, guarded, under_pressure):
    amqp.queue("long", 81)
    with raising(memory, "of_queues", BrokerUnavailable("the broker is overloaded")):
        report = once.run_once()
    assert report.deleted == 1
    assert "the memory of the queues could not be listed" in report.errors[0]
