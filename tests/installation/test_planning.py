"""Plans: wanted resources compared with present ones."""

import pytest

from installation import reading
from installation.planning import Do, make_plan
from installation.resources import DEFAULTS, InvalidFile, Kind, Present, State


def present(kind, *key, pk=1, **fields):
    options = {name: fields.pop(name) for name in ("is_whole", "obstacle") if name in fields}
    return Present(kind, key, pk, {**DEFAULTS[kind], **fields}, **options)


ALICE = present(Kind.OWNER, "alice@example.org", access=True)
BOB = present(Kind.OWNER, "bob@example.org")
OPS = present(Kind.OWNER, "ops@example.org", access=True, operator=True)
CI = present(Kind.PULSE_USER, "ci", pk=7, owners=["alice@example.org"], max_length=8000)
LONG = present(Kind.QUEUE, "/", "queue/ci/long", pk=8, max_length=9000)
HPC = present(Kind.OFFERING, "11" * 16, pk=9, name="hpc", members=["alice@example.org"])
GONE_QUEUE = present(Kind.QUEUE, "/", "queue/ci/gone", pk=10, max_length=9, is_whole=False)
PELICAN = present(Kind.APPLICATION, "pelican", pk=11)
PRESENT = [ALICE, BOB, OPS, CI, present(Kind.PULSE_USER, "ops", pk=12), LONG, HPC]


def state(*others, created=(), changed=(), broker_users=(), with_queues=()):
    rows = {(one.kind, one.key): one for one in [*PRESENT, *others]}
    here = {(one.kind, one.key): one not in changed for one in (*created, *changed)}
    return State(rows, here, set(with_queues), dict(broker_users))


def plan(text, *others, prune=False, **options):
    return make_plan(reading.read(f"version: 1\n{text}".encode()), state(*others, **options), prune=prune)


NEW_OWNER_AND_PULSE_USER = """\
owners: {carol@example.org: {access: true}}
pulse_users: {new: {owners: [carol@example.org], max_length: 9}}"""

PATTERN_AND_NAME = """\
queues:
- {pattern: 'queue/.*', max_length: 1}
- {name: queue/ci/long, max_length: 9000}"""

RAISED_AND_LOWERED = """\
queues: [{name: queue/ci/long, warn_length: 20000, max_length: null}]
pulse_users: {ci: {max_length: 90000}, ops: {max_length: 9}}"""

CHANGES = {
    "owners: {carol@example.org: {access: true}}": ["+ create owner carol@example.org: access yes"],
    "owners: {carol@example.org: {operator: true}}": ["+ create owner carol@example.org: access yes, operator yes"],
    "owners: {alice@example.org: {access: false}}": ["~ change owner alice@example.org: access yes → no"],
    "owners: {alice@example.org: {access: true}}": [],
    NEW_OWNER_AND_PULSE_USER: [
        "+ create owner carol@example.org: access yes",
        "+ create Pulse user new: owners carol@example.org, max_length 9",
    ],
    "pulse_users: {ci: {max_length: null}}": ["~ change Pulse user ci: max_length 8000 → default"],
    "pulse_users: {ci: {}}": [],
    "offerings: [{name: hpc, members: []}]": ["~ change offering hpc: members alice@example.org → nobody"],
    f"offerings: [{{name: gpu, uuid: '{'11' * 16}'}}]": ["~ change offering gpu: name hpc → gpu"],
    'queues: [{name: "new\\n", unbounded: true}]': ["+ create limits of the queue new\\x0a in /: unbounded yes"],
    "queues: [{pattern: 'queue/ci/lon.', max_length: 6}]": [
        "~ change limits of the queue queue/ci/long in /: max_length 9000 → 6"
    ],
    "queues: [{pattern: 'queue/ci/lon', max_length: 6}]": [],
    PATTERN_AND_NAME: [],
    RAISED_AND_LOWERED: [
        "~ change Pulse user ci: max_length 8000 → 90000",
        "~ change limits of the queue queue/ci/long in /: warn_length default → 20000, max_length 9000 → default",
        "~ change Pulse user ops: max_length default → 9",
    ],
    "applications: [pelican]": ["+ create application pelican"],
}


@pytest.fixture(autouse=True)
def defaults(settings):
    settings.GUARDIAN_WARN_QUEUE_LENGTH, settings.GUARDIAN_MAX_QUEUE_LENGTH = 5, 10_000
    settings.GUARDIAN_PULSE_VHOST, settings.GUARDIAN_RESERVED_USERS = "/", ["guest-.*"]


@pytest.mark.parametrize(("text", "changes"), CHANGES.items())
def test_a_plan_has_what_differs(text, changes):
    assert [str(change) for change in plan(text).changes] == changes


GONE = present(Kind.OWNER, "gone@example.org", obstacle="This owner is deactivated.")
REMOVED = present(Kind.PULSE_USER, "removed", obstacle="It is being removed.")

REFUSED = [
    (
        "pulse_users: {ci: {owners: [alcie@example.org]}}",
        "2:28: There is no active owner alcie@example.org, here or in the file. Did you mean 'alice@example.org'?",
    ),
    ("pulse_users: {ci: {owners: [bob@example.org]}}", "2:28: bob@example.org has no access"),
    ("pulse_users: {new: {}}", "2:15: A new Pulse user needs at least one owner"),
    ("pulse_users: {guest-admin: {owners: [alice@example.org]}}", "2:15: 'guest-admin' is reserved"),
    (
        "pulse_users: {ci: {notification_emails: [alice@example.org]}}",
        "2:41: alice@example.org belongs to an owner",
    ),
    (f"offerings: [{{name: hpc}}, {{name: other, uuid: '{'11' * 16}'}}]", "2:26: 'other' is here twice"),
    ("pulse_users: {removed: {}}", "2:15: It is being removed"),
    ("pulse_users: {ci: {max_length: 3}}", "2:32: The warning threshold would be 5"),
    ("pulse_users: {root: {owners: [alice@example.org]}}", "2:15: An administrator of the broker"),
    ("offerings: [{name: hpc, members: [bob@example.org]}]", "2:34: bob@example.org has no access"),
    ("offerings: [{name: gpu}]", "2:20: There are 2 offerings of this name"),
    ("owners: {ops@example.org: {access: false}}", "2:36: An operator always has access"),
    ("owners: {ops@example.org: {operator: false}}", "2:38: No operator would remain"),
    ("owners: {gone@example.org: {access: true}}", "2:10: This owner is deactivated"),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_plan_is_refused_with_the_place_in_the_file(text, problem):
    others = [GONE, REMOVED, *(present(Kind.OFFERING, key * 16, name="gpu") for key in ("22", "33"))]
    with pytest.raises(InvalidFile) as refused:
        plan(text, *others, broker_users={"root": "An administrator of the broker"})
    [found] = refused.value.problems
    assert f"{found.at.line}:{found.at.column}: {found.text}".startswith(problem)


def test_a_user_of_the_broker_is_adopted():
    [change] = plan("pulse_users: {old: {owners: [alice@example.org]}}", broker_users={"old": ""}).changes
    assert str(change) == "+ adopt Pulse user old: owners alice@example.org"


def test_prune_removes_only_what_apply_created_and_owners_last():
    found = plan("owners: {ops@example.org: {}}", prune=True, created=[ALICE, CI, LONG])
    assert [str(change) for change in found.changes] == [
        "- remove Pulse user ci",
        "- remove limits of the queue queue/ci/long in /: max_length 9000 → default",
        "- remove owner alice@example.org",
    ]


NOT_PRUNED = [
    ("queues: [{pattern: queue/ci/.*, max_length: 9}]", {"created": [GONE_QUEUE]}, []),
    ("", {"changed": [LONG]}, ["Not removed: limits of the queue queue/ci/long. A person changed it since."]),
    ("", {"changed": [BOB]}, ["Not removed: owner bob@example.org. A person changed it since."]),
    (
        "",
        {"created": [PELICAN], "with_queues": ["pelican"]},
        ["Not removed: application pelican. It has queues."],
    ),
]


@pytest.mark.parametrize(("text", "options", "notes"), NOT_PRUNED)
def test_prune_leaves_what_the_file_covers_what_a_person_changed_and_what_is_in_use(text, options, notes):
    found = plan(f"owners: {{ops@example.org: {{}}}}\n{text}", GONE_QUEUE, PELICAN, prune=True, **options)
    assert [one for one in found.changes if one.do is Do.REMOVE] == []
    assert found.notes == notes


def test_prune_leaves_an_owner_who_owns_what_stays():
    found = plan("owners: {ops@example.org: {}}", prune=True, created=[ALICE])
    assert found.changes == []
    assert found.notes == ["The owner alice@example.org stays, as the owner of ci."]


def test_prune_waits_with_an_owner_until_their_pulse_user_is_gone():
    pulse_user = present(Kind.PULSE_USER, "going", owners=["bob@example.org"], obstacle="It is being removed.")
    found = plan("owners: {ops@example.org: {}}", pulse_user, prune=True, created=[BOB, pulse_user])
    assert found.changes == []
    assert found.notes == [
        "Not removed: Pulse user going. It is being removed.",
        "The owner bob@example.org stays, as the owner of going.",
    ]


def test_a_file_without_owners_prunes_nothing():
    with pytest.raises(InvalidFile, match="A file without owners removes nothing"):
        plan("pulse_users: {}", prune=True, created=[CI])


def test_the_digest_depends_on_the_changes_and_not_on_their_order_in_the_file():
    texts = ["{a@example.org: {}, b@example.org: {}}", "{b@example.org: {}, a@example.org: {}}", "{a@example.org: {}}"]
    first, second, third = (plan(f"owners: {text}").digest([]) for text in texts)
    assert first == second != third
