"""Confirmation of a person's change that deletes queues, or lets the next pass delete them.

Such a change is refused with :class:`ConfirmationRequired`, which has the queues and a signed text. With this text the
same person can make the same change, if it affects no further queue.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from django.core import signing
from django.db.models import Model

from core.formatting import counted
from rabbit.names import readable

VALID_FOR = timedelta(minutes=10)

MAX_EXAMPLES = 20
"""Queues that a page or an answer names."""

_SALT = "core.confirmation"


class AffectedQueue(NamedTuple):
    """A queue that a change deletes. ``messages`` is its length as last listed, or None if unknown."""

    id: int
    vhost: str
    name: str
    messages: int | None

    @property
    def readable_name(self) -> str:
        return readable(self.name)

    @property
    def readable_vhost(self) -> str:
        return readable(self.vhost)


@dataclass(frozen=True)
class Effect:
    """The queues that a change deletes, now or in the next pass, or purges."""

    queues: Sequence[AffectedQueue]
    verb: str = "deletes"

    def __add__(self, other: "Effect") -> "Effect":
        return Effect([*self.queues, *other.queues])

    @property
    def messages(self) -> int:
        """The number of messages in queues of known length."""
        return sum(queue.messages or 0 for queue in self.queues)

    @property
    def examples(self) -> list[AffectedQueue]:
        """The first ``MAX_EXAMPLES`` queues, longest first."""
        ordered = sorted(self.queues, key=lambda queue: (-(queue.messages or 0), queue.name, queue.vhost))
        return ordered[:MAX_EXAMPLES]

    @property
    def more(self) -> int:
        return max(0, len(self.queues) - MAX_EXAMPLES)

    @property
    def sentence(self) -> str:
        unknown = sum(queue.messages is None for queue in self.queues)
        queues, messages = counted(len(self.queues), "queue"), counted(self.messages, "message")
        of_unknown = f", and an unknown number in {counted(unknown, 'queue')}" if unknown else ""
        return f"This {self.verb} {queues} with {messages}{of_unknown}."

    @property
    def keys(self) -> list[int]:
        return [queue.id for queue in self.queues]

    def further(self, number: int) -> str:
        return f"The change now {self.verb} {counted(number, 'more queue')} than you confirmed."

    def as_json(self) -> dict[str, Any]:
        examples = [{"name": one.name, "vhost": one.vhost, "messages": one.messages} for one in self.examples]
        return {"queues": len(self.queues), "messages": self.messages, "examples": examples}


class Confirmable(Protocol):
    """What a change destroys. A confirmation counts for its ``keys``, such as ids of queues."""

    @property
    def keys(self) -> Collection[int | str]: ...

    @property
    def sentence(self) -> str: ...

    def further(self, number: int) -> str:
        """Return why a confirmation is not sufficient that lacks this number of keys."""

    def as_json(self) -> dict[str, Any]: ...


class ConfirmationRequired(Exception):
    """The change deletes queues or messages and is not confirmed. Nothing was changed.

    ``confirm`` is the text that confirms it. ``reason`` says why a given confirmation was not accepted.
    """

    def __init__(self, effect: Confirmable, confirm: str, reason: str) -> None:
        super().__init__(f"{reason} {effect.sentence}".lstrip())
        self.effect = effect
        self.confirm = confirm
        self.reason = reason


class ConfirmableChange:
    """A change by a person, or a command (None), to some rows, and the confirmation that came with it.

    ``values`` are the new values, in types of JSON. ``confirm`` is the text of a :class:`ConfirmationRequired`, or
    empty.
    """

    def __init__(
        self, by: Model | None, action: str, rows: Iterable[Model], values: Mapping[str, Any], confirm: str = ""
    ) -> None:
        named = [by and by.pk, action, sorted((row._meta.label, row.pk) for row in rows), values]
        self._digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        self._confirmed: frozenset[int | str] = frozenset()
        self._reason = ""
        if confirm:
            self._read(confirm)

    def _read(self, confirm: str) -> None:
        try:
            signed = signing.loads(confirm, salt=_SALT, max_age=VALID_FOR)
        except signing.SignatureExpired:
            self._reason = "The confirmation has expired. It is valid for 10 minutes."
        except signing.BadSignature:
            self._reason = "The confirmation is invalid. Send it exactly as you got it."
        else:
            if signed["change"] == self._digest:
                self._confirmed = frozenset(signed["queues"])
            else:
                self._reason = "The confirmation is for another change, or was given to another person."

    def question(self, effect: Confirmable) -> ConfirmationRequired | None:
        """Return what to ask about this effect, or None if it destroys nothing or all of it is confirmed."""
        further = sum(key not in self._confirmed for key in effect.keys)
        if not further:
            return None
        reason = self._reason
        if self._confirmed:
            reason = effect.further(further)
        signed = {"change": self._digest, "queues": sorted(effect.keys)}
        return ConfirmationRequired(effect, signing.dumps(signed, salt=_SALT, compress=True), reason)

    def require_confirmed(self, effect: Confirmable) -> None:
        """Raise ConfirmationRequired unless the person confirmed this effect. Call it in the change's transaction."""
        if (question := self.question(effect)) is not None:
            raise question
