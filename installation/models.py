"""What ``apply`` created, which is all that ``--prune`` may remove."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db import models
from django.db.models.signals import post_save
from django.dispatch import receiver

from accounts.models import PulseUser
from installation.resources import Key, Kind, Values

_applying: ContextVar[bool] = ContextVar("applying", default=False)


class Created(models.Model):
    """A row that ``apply`` created. For a queue: its first own limits.

    The primary key tells it from a later row of the same name that a person created. If ``what`` is no longer true of
    the row, a person has changed it, so ``--prune`` leaves it.
    """

    kind = models.CharField(max_length=20, choices=[(kind.name.lower(), kind.value) for kind in Kind])
    object_id = models.BigIntegerField(help_text="The primary key of the owner, Pulse user, queue and so on.")
    what = models.JSONField(help_text="The key of the resource. For a queue: its own limits.")
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "object_id"], name="one_record_of_a_creation")]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.object_id}"

    @classmethod
    def record(cls, kind: Kind, row: models.Model, what: Key | Values) -> None:
        """Record that ``apply`` creates this row. Call it in the transaction that inserts the row."""
        cls.objects.update_or_create(kind=kind.name.lower(), object_id=row.pk, defaults={"what": what})


@contextmanager
def recording_creations() -> Iterator[None]:
    """Record the Pulse users that are created inside the ``with`` block."""
    token = _applying.set(True)
    try:
        yield
    finally:
        _applying.reset(token)


@receiver(post_save, sender=PulseUser)
def record_pulse_user(sender: object, instance: PulseUser, created: bool, **_: Any) -> None:
    """Record a Pulse user that ``apply`` creates: the function that pages use has transactions of its own."""
    if created and _applying.get():
        Created.record(Kind.PULSE_USER, instance, (instance.username,))
