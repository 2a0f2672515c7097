"""The applications and their keys; and the rows of the store that lies in the database."""

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

MAX_NAME_LENGTH = 50
"""Characters in the name of an application or a queue."""


class NameField(models.CharField):  # type: ignore[type-arg]
    """A name, in the order of its bytes on every database: that in which queues are listed, page by page."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        """Return how the database is to make the column."""
        collation = "C" if connection.vendor == "postgresql" else None
        return {**super().db_parameters(connection), "collation": collation}


class Application(models.Model):
    """A program, or several, with queues of its own. It is known by its name and by any of its keys."""

    name = models.CharField(max_length=MAX_NAME_LENGTH, unique=True)
    created = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ApplicationKey(models.Model):
    """A key by which an application is known. The key is shown once; here is only its digest."""

    application = models.ForeignKey(Application, on_delete=models.CASCADE, related_name="keys")
    digest = models.CharField(max_length=64, unique=True, editable=False, help_text="SHA-256, in hex.")
    beginning = models.CharField(max_length=8, editable=False, help_text="Its first characters, to tell it by.")
    created = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["created", "id"]

    def __str__(self) -> str:
        return f"{self.beginning}… of {self.application}"


class QueueRow(models.Model):
    """A queue of an application. The application is a name here, as in every store."""

    application = NameField(max_length=MAX_NAME_LENGTH)
    name = NameField(max_length=MAX_NAME_LENGTH)
    created = models.BigIntegerField(help_text="Ticks since 1970.")
    partitions = models.PositiveSmallIntegerField()
    type = models.CharField(max_length=10)
    consistency = models.CharField(max_length=15)
    principals = models.JSONField(default=list)
    contents = models.BigIntegerField(
        unique=True, help_text="What its messages are stored under; a new one when it is truncated."
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["application", "name"], name="one_queue_of_a_name")]

    def __str__(self) -> str:
        return f"{self.name} of {self.application}"


class PrincipalRow(models.Model):
    """A principal of a queue, so that the queues that name somebody are found. Both names are the queue's."""

    queue = models.ForeignKey(QueueRow, on_delete=models.CASCADE, related_name="principal_rows")
    principal = NameField(max_length=300)
    application = NameField(max_length=MAX_NAME_LENGTH)
    name = NameField(max_length=MAX_NAME_LENGTH)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["principal", "application", "name"], name="one_row_for_each_principal")
        ]

    def __str__(self) -> str:
        return f"{self.principal} of {self.name} of {self.application}"


class PartitionRow(models.Model):
    """The time of the last message that was pushed to a partition, so that the next one gets a later id."""

    pk = models.CompositePrimaryKey("contents", "partition")
    contents = models.BigIntegerField()
    partition = models.PositiveSmallIntegerField()
    last = models.BigIntegerField(help_text="Ticks since 1970.")

    def __str__(self) -> str:
        return f"partition {self.partition} of {self.contents}"


class MessageRow(models.Model):
    """A message. The primary key is the order in which a partition is read."""

    pk = models.CompositePrimaryKey("contents", "partition", "ticks", "rest")
    contents = models.BigIntegerField()
    partition = models.PositiveSmallIntegerField()
    ticks = models.BigIntegerField()
    rest = models.BigIntegerField(help_text="The other half of the id, less 2^63, as the database has signed numbers.")
    body = models.BinaryField()
    content_type = models.CharField(max_length=255)
    expires = models.BigIntegerField(db_index=True, help_text="Ticks since 1970.")

    def __str__(self) -> str:
        return f"{self.ticks} in partition {self.partition} of {self.contents}"


class Discarded(models.Model):
    """Contents that no queue has any more, and that are removed from the disk by and by."""

    contents = models.BigIntegerField(primary_key=True)
    due = models.BigIntegerField(db_index=True, help_text="When to remove them; ticks since 1970.")
    swept = models.BooleanField(
        default=False, help_text="They were removed once, and are again, since a push may have been under way."
    )

    def __str__(self) -> str:
        return str(self.contents)


class Position(models.Model):
    """How far a consumer has processed a partition."""

    queue = models.ForeignKey(QueueRow, on_delete=models.CASCADE, related_name="positions")
    consumer = models.CharField(max_length=MAX_NAME_LENGTH)
    partition = models.PositiveSmallIntegerField()
    message_id = models.UUIDField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["queue", "consumer", "partition"], name="one_position_for_each_partition")
        ]

    def __str__(self) -> str:
        return f"{self.consumer} in partition {self.partition} of {self.queue_id}"


class Worker(models.Model):
    """A worker of an application's consumer. It counts its beats here; who sees none for its seconds removes the row.

    Nobody's clock is compared with another's: each one measures with its own how long it has seen the same number.
    """

    name = models.UUIDField(unique=True)
    application = models.CharField(max_length=MAX_NAME_LENGTH)
    consumer = models.CharField(max_length=MAX_NAME_LENGTH)
    beat = models.BigIntegerField(default=0)
    seconds = models.FloatField(help_text="Without a beat for so long, it has no partition any more.")

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["application", "consumer"], name="workers_of_a_consumer")]

    def __str__(self) -> str:
        return f"{self.name} of {self.consumer} of {self.application}"


class PartitionLease(models.Model):
    """Which worker of a consumer has a partition. It is free where that worker has no row any more."""

    consumer = models.CharField(max_length=MAX_NAME_LENGTH)
    application = models.CharField(max_length=MAX_NAME_LENGTH)
    queue = models.CharField(max_length=MAX_NAME_LENGTH)
    partition = models.PositiveSmallIntegerField()
    holder = models.UUIDField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["consumer", "application", "queue", "partition"], name="one_lease_for_each_partition"
            )
        ]

    def __str__(self) -> str:
        return f"partition {self.partition} of {self.queue} of {self.application} for {self.consumer}"
