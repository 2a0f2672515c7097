"""Dead letters: why the messages of a queue died, and sending them back after each group was confirmed."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID

from django.core import signing

from accounts.models import Owner
from core import broker
from core.confirmation import VALID_FOR
from queues.actions import peek
from queues.archives import replay
from queues.models import Move, Queue
from queues.moves import moving, routes
from queues.moves.moving import MoveRefused
from queues.rules import dead_letters
from queues.rules.dead_letters import Group
from rabbit.errors import NotOnBroker, Refused
from rabbit.fetching import Bounds
from rabbit.snapshot import CLASSIC

LOOK = Bounds(messages=1000, bytes=8 * 1024 * 1024, seconds=2.0)

WITHOUT_LOOKING = (
    "Guardian can't look at the messages of a quorum queue first, because that counts as a delivery, and the broker "
    "drops messages that were delivered too often. So you send back all of them, or the first ones, each straight to "
    "the queue in which it died. Messages stay if that is not a queue of this Pulse user that dead-letters here."
)

_SALT = "queues.moves"


class Looked(NamedTuple):
    """The dead letters among the first ``looked`` of ``ready`` messages. ``others`` are no dead letters.

    ``confirm`` is the text that confirms these groups. ``reason`` is why there are none.
    """

    groups: Sequence[Group]
    others: int
    looked: int
    ready: int
    confirm: str
    reason: str = ""

    @property
    def possible(self) -> list[Group]:
        """The groups that can be sent back."""
        return [group for group in self.groups if not group.origin.why_not]


class GroupsUnconfirmed(MoveRefused):
    """Nothing was sent, because the groups are not confirmed. ``looked`` has them."""

    status = HTTPStatus.CONFLICT

    def __init__(self, looked: Looked) -> None:
        super().__init__(looked.reason or "Confirm the groups of messages to send back.")
        self.looked = looked


def look(queue: Queue, by: Owner, count: int | None = None) -> Looked:
    """Look at the first messages of a classic queue, and return its dead letters in groups."""
    require_pulse_user(queue, by)
    if queue.type != CLASSIC:
        return Looked([], 0, 0, 0, _signed(queue, by, []), WITHOUT_LOOKING)
    bounds = LOOK._replace(messages=min(count or LOOK.messages, LOOK.messages))
    found = peek.look(queue, by, bounds)
    letters = [letter for message in found.messages if (letter := dead_letters.read(message.headers))]
    looked = len(found.messages)
    try:
        groups = dead_letters.grouped(letters, routes.surroundings(queue)) if letters else []
    except (NotOnBroker, Refused) as error:
        raise MoveRefused("Guardian can't look up what leads to this queue on the broker.") from error
    groups = groups[: dead_letters.MAX_GROUPS]
    counts = [[*group.origin.key, group.messages] for group in groups if not group.origin.why_not]
    return Looked(groups, looked - len(letters), looked, found.ready, _signed(queue, by, counts))


def send_back(
    queue: Queue,
    by: Owner,
    *,
    confirm: str = "",
    groups: Sequence[tuple[str, ...]] | None = None,
    count: int | None = None,
    uuid: UUID | None = None,
) -> Move:
    """Create a move of these groups of dead letters, all that were confirmed if None, back to where they died.

    Raises GroupsUnconfirmed without ``confirm``.
    """
    if not confirm:
        raise GroupsUnconfirmed(look(queue, by, count))
    require_pulse_user(queue, by)
    counts = _confirmed(queue, by, confirm)
    if queue.type != CLASSIC:
        return moving.start_to_origin(queue, by, None, count, uuid)
    chosen = set(counts if groups is None else groups)
    if not chosen:
        raise MoveRefused("Choose at least one group of messages.", "groups")
    if not chosen <= counts.keys():
        raise MoveRefused("The confirmation has no such group. Send the groups exactly as you got them.", "groups")
    # Room for those that were not looked at is required when they are sent.
    with broker.session(queue.vhost) as session:
        for name in {key[3] for key in chosen}:
            coming = sum(number for key, number in counts.items() if key in chosen and key[3] == name)
            replay.require_room(replay.room(session, queue.vhost, queue.pulse_user, name), coming)
    return moving.start_to_origin(queue, by, sorted(map(list, chosen)), count, uuid)


def require_pulse_user(queue: Queue, by: Owner) -> None:
    """Require that this owner may send messages of a queue back. Raises Refusal."""
    moving.require_source(queue, by)
    if queue.pulse_user is None:
        raise MoveRefused(
            "Messages can be sent back only from a queue of a Pulse user. Move these to a queue instead.",
            status=HTTPStatus.CONFLICT,
        )


def _signed(queue: Queue, by: Owner, counts: list[list[Any]]) -> str:
    return signing.dumps({"queue": queue.pk, "by": by.pk, "groups": counts}, salt=_SALT, compress=True)


def _confirmed(queue: Queue, by: Owner, confirm: str) -> dict[tuple[str, ...], int]:
    """Return the confirmed groups, and how many of the messages that were looked at each has."""
    try:
        signed = signing.loads(confirm, salt=_SALT, max_age=VALID_FOR)
    except signing.SignatureExpired as error:
        raise MoveRefused("The confirmation has expired. It is valid for 10 minutes.", "confirm") from error
    except signing.BadSignature as error:
        raise MoveRefused("The confirmation is invalid. Send it exactly as you got it.", "confirm") from error
    if (signed["queue"], signed["by"]) != (queue.pk, by.pk):
        raise MoveRefused("The confirmation is for another queue, or was given to another person.", "confirm")
    return {tuple(key): number for *key, number in signed["groups"]}
