"""What a restore declares, binds and sends, what it leaves out, and what would be lost; pure.

Guardian declares with its own rights, but only what the Pulse user could declare: RabbitMQ lets it dead-letter to an
exchange that it may write to, and bind to one that it may read.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.formatting import counted, duration
from rabbit.arguments import QUEUE_TYPE, Difference
from rabbit.names import readable
from rabbit.permissions import Permissions, allows
from rabbit.policies import DROP_HEAD, MAX_BYTES, MAX_LENGTH, OVERFLOW

DEAD_LETTER_EXCHANGE = "x-dead-letter-exchange"
DEAD_LETTER_ARGUMENTS = (DEAD_LETTER_EXCHANGE, "x-dead-letter-routing-key", "x-dead-letter-strategy")

TTL, EXPIRES = "message-ttl", "expires"

LEAVABLE = tuple(f"x-{name}" for name in (TTL, EXPIRES, MAX_LENGTH, MAX_BYTES))
"""The arguments that a restore may leave out, because they can drop its messages."""

DEFAULT_EXCHANGE = "amq.default"
"""The default exchange, as permissions name it."""

LIMIT = "limit"


class Definition(NamedTuple):
    """How a queue was declared and bound when it was archived. ``bindings`` is None if they are not known."""

    type: str
    durable: bool
    auto_delete: bool
    arguments: Mapping[str, Any]
    bindings: Sequence[Mapping[str, Any]] | None


class LeftOut(NamedTuple):
    """What is not declared or bound as it was, and why."""

    what: str
    why: str


class Policies(NamedTuple):
    """The definitions of the policy and the operator policy that apply to the queue."""

    of_users: Mapping[str, Any]
    of_operators: Mapping[str, Any]


class Load(NamedTuple):
    """What is sent to a queue, and its ready messages and those that other replays send. ``size`` is about."""

    messages: int
    size: int
    present: int = 0


class Loss(NamedTuple):
    """A setting with which RabbitMQ would drop messages. ``argument`` is set if it can be left out."""

    code: str
    text: str
    argument: str = ""


@dataclass(frozen=True)
class Plan:
    """What a restore does.

    ``declares``: the queue does not exist. Otherwise only messages are sent, and ``differences`` says how the queue is
    declared otherwise than before.
    """

    declares: bool = False
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] | None = None
    bindings: Sequence[Mapping[str, Any]] = ()
    left_out: Sequence[LeftOut] = ()
    differences: Sequence[Difference] = ()
    losses: Sequence[Loss] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what the replay's row keeps."""
        return {
            "declares": self.declares,
            "durable": self.durable,
            "auto_delete": self.auto_delete,
            "arguments": dict(self.arguments or {}),
            "bindings": list(self.bindings),
            "left_out": [one._asdict() for one in self.left_out],
            "differences": [one._asdict() for one in self.differences],
        }


def planned(
    was: Definition,
    rights: Permissions,
    exchanges: Collection[str],
    policies: Policies,
    load: Load,
    without: Collection[str] = (),
) -> Plan:
    """Return the plan for a queue that does not exist. ``exchanges`` are those of its vhost.

    The arguments ``without`` are left out by choice.
    """
    chosen = [name for name in was.arguments if name in without and name in LEAVABLE]
    left_out = [LeftOut(f"the argument {name}", "you chose so") for name in chosen]
    arguments = {name: value for name, value in was.arguments.items() if name not in chosen}
    arguments.setdefault(QUEUE_TYPE, was.type)  # the vhost's default may be another type by now
    target = arguments.get(DEAD_LETTER_EXCHANGE)
    if target is not None and not allows(rights.write, str(target) or DEFAULT_EXCHANGE):
        arguments = {name: value for name, value in arguments.items() if name not in DEAD_LETTER_ARGUMENTS}
        what = f"the dead-letter exchange {readable(str(target)) or '(default)'}"
        left_out.append(LeftOut(what, "the Pulse user may not publish to it"))
    if was.bindings is None:
        left_out.append(LeftOut("its bindings", "the archive does not have them"))
    bindings = []
    for one in was.bindings or ():
        if why := _why_not_bound(one["exchange"], rights, exchanges):
            left_out.append(LeftOut(f"the binding to {binding_name(one)}", why))
        else:
            bindings.append(one)
    return Plan(
        declares=True,
        durable=was.durable,
        auto_delete=was.auto_delete,
        arguments=arguments,
        bindings=bindings,
        left_out=left_out,
        losses=losses(arguments, policies, load, can_leave_out=True),
    )


def _why_not_bound(exchange: str, rights: Permissions, exchanges: Collection[str]) -> str:
    if not allows(rights.read, exchange):
        return "the Pulse user may not read from it"
    return "" if exchange in exchanges else "the exchange does not exist"


def losses(arguments: Mapping[str, Any], policies: Policies, load: Load, *, can_leave_out: bool = False) -> list[Loss]:
    """Return the settings with which the broker would drop messages of a restore, or refuse them."""
    overflow = next(
        (
            found[name]
            for found, name in (
                (arguments, f"x-{OVERFLOW}"), (policies.of_operators, OVERFLOW), (policies.of_users, OVERFLOW),
            )
            if name in found
        ),
        DROP_HEAD,
    )  # fmt: skip
    found = []
    for name, source, values in _settings(arguments, policies):
        value = values.get(name)
        text = _loss(name.removeprefix("x-"), value, load, drops=overflow == DROP_HEAD) if type(value) is int else ""
        if text:
            argument = name if can_leave_out and values is arguments else ""
            found.append(Loss(f"{source} {name}", f"{text} ({source} {name}).", argument))
    return found


def _settings(arguments: Mapping[str, Any], policies: Policies) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name in (TTL, EXPIRES, MAX_LENGTH, MAX_BYTES):
        yield f"x-{name}", "argument", arguments
        yield name, "policy", policies.of_users
        yield name, "operator policy", policies.of_operators


def _loss(name: str, value: int, load: Load, *, drops: bool) -> str:
    """Return what a setting does to the messages, as a sentence without a full stop, or an empty text if nothing."""
    if name == TTL:
        return f"RabbitMQ drops messages that nobody has consumed after {_time(value)}"
    if name == EXPIRES:
        return f"RabbitMQ deletes the queue with its messages when no client has used it for {_time(value)}"
    length = load.present + load.messages if name == MAX_LENGTH else load.size
    if length <= value:
        return ""
    what = counted(value, "message" if name == MAX_LENGTH else "byte")
    if drops:
        return f"The queue holds {what}, and RabbitMQ drops the oldest messages past that"
    return f"The queue holds {what}, and RabbitMQ refuses messages past that, which ends the restore"


def _time(milliseconds: int) -> str:
    return duration(milliseconds / 1000) if milliseconds >= 1000 else counted(milliseconds, "millisecond")


def shown(value: Any) -> str:
    """Return an argument's value for display. None: it is not set."""
    return "not set" if value is None else readable(str(value)) or '""'


def binding_name(binding: Mapping[str, Any]) -> str:
    """Return the exchange of a binding, with the routing key and the arguments, in words."""
    text = readable(binding["exchange"])
    if key := binding["routing_key"]:
        text += f" with the routing key {readable(key)}"
    if arguments := binding["arguments"]:
        text += f" with {', '.join(f'{readable(name)}: {shown(value)}' for name, value in arguments.items())}"
    return text


@dataclass(frozen=True)
class RestoreEffect:
    """Why a restore needs a confirmation: messages would be lost, or the queue would be over its deletion limit.

    ``fits`` is how many messages reach the limit at most, or None if all do not exceed it.
    """

    losses: Sequence[Loss]
    messages: int
    limit: int | None = None
    fits: int | None = None

    @property
    def is_over_limit(self) -> bool:
        return self.fits is not None and self.messages > self.fits

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({*(one.code for one in self.losses), *([LIMIT] if self.is_over_limit else [])})

    @property
    def sentence(self) -> str:
        texts = [one.text for one in self.losses]
        if self.is_over_limit:
            all_of_them = counted(self.messages, "message")
            texts.insert(
                0,
                f"With {all_of_them}, the queue is over its deletion limit of {self.limit:,}, and Guardian deletes it "
                f"again. {self.fits:,} fit.",
            )
        return " ".join(texts)

    def further(self, number: int) -> str:
        """Return why an earlier confirmation is not sufficient."""
        return "The restore can now lose messages in another way than you confirmed."

    def as_json(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "limit": self.limit,
            "fits": self.fits,
            "losses": [{"text": one.text, "argument": one.argument or None} for one in self.losses],
        }
