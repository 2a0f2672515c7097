"""Applications, their keys, and the rows of the database store and of its workers' leases."""

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

MAX_NAME_LENGTH = 50
"""Characters in the names of applications, queues and consumers."""


class NameField(models.CharField):  # type: ignore[type-arg]
    """A name that every database sorts by its bytes. Lists of queues and their pages rely on this order."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        collation = "C" if connection.vendor == "postgresql" else None
        return {**super().db_parameters(connection), "collation": collation}


class Application(models.Model):
    """One or several programs that share queues. They authenticate with any of the application's keys."""

    name = models.CharField(max_length=MAX_NAME_LENGTH, unique=True)
    created = models.DateTimeField(db_default=Now(), editable=False)
    stored_bytes = models.BigIntegerField(
        default=0, db_default=0, editable=False, help_text="At least the bytes of its messages. See quota.py."
    )
    measure_above = models.BigIntegerField(
        default=0, db_default=0, editable=False, help_text="A task measures the messages if stored_bytes is more."
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ApplicationKey(models.Model):
    """A key of an application. Only its digest is stored."""

    application = models.ForeignKey(Application, on_delete=models.CASCADE, related_name="keys")
    digest = models.CharField(max_length=64, unique=True, editable=False, help_text="SHA-256, in hex.")
    beginning = models.CharField(max_length=8, editable=False, help_text="The first characters, to identify the key.")
    created = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ["created", "id"]

    def __str__(self) -> str:
        return f"{self.beginning}… of {self.application}"


class QueueRow(models.Model):
    """A queue of an application, which every store identifies by its name."""

    application = NameField(max_length=MAX_NAME_LENGTH)
    name = NameField(max_length=MAX_NAME_LENGTH)
    created = models.BigIntegerField(help_text="Ticks since 1970.")
    partitions = models.PositiveSmallIntegerField()
    type = models.CharField(max_length=10)
    consistency = models.CharField(max_length=15)
    principals = models.JSONField(default=list)
    contents = models.BigIntegerField(
        unique=True, help_text="The number that its messages refer to. Truncation assigns a new one."
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["application", "name"], name="one_queue_of_a_name")]

    def __str__(self) -> str:
        return f"{self.name} of {self.application}"


class PrincipalRow(models.Model):
    """A principal of a queue, to find the queues that name a principal. The names are copied from the queue."""

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
    """The time of a partition's last pushed message. The next message gets a later id."""

    pk = models.CompositePrimaryKey("contents", "partition")
    contents = models.BigIntegerField()
    partition = models.PositiveSmallIntegerField()
    last = models.BigIntegerField(help_text="Ticks since 1970.")

    def __str__(self) -> str:
        return f"partition {self.partition} of {self.contents}"


class MessageRow(models.Model):
    """A message. Partitions are read in the order of the primary key."""

    pk = models.CompositePrimaryKey("contents", "partition", "ticks", "rest")
    contents = models.BigIntegerField()
    partition = models.PositiveSmallIntegerField()
    ticks = models.BigIntegerField()
    rest = models.BigIntegerField(help_text="The lower 64 bits of the id minus 2^63, to fit a signed integer.")
    body = models.BinaryField()
    content_type = models.CharField(max_length=255)
    expires = models.BigIntegerField(db_index=True, help_text="Ticks since 1970.")

    def __str__(self) -> str:
        return f"{self.ticks} in partition {self.partition} of {self.contents}"


class Discarded(models.Model):
    """The contents number of a deleted queue, whose messages a task deletes."""

    contents = models.BigIntegerField(primary_key=True)
    due = models.BigIntegerField(db_index=True, help_text="When to delete the messages, in ticks since 1970.")
    swept = models.BooleanField(
        default=False, help_text="Deleted once. A second deletion catches messages of a concurrent push."
    )

    def __str__(self) -> str:
        return str(self.contents)


class Position(models.Model):
    """The last message of a partition that a consumer has processed."""

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
    """A worker of an application's consumer. It increments ``beat`` as a heartbeat.

    Another worker that sees no heartbeat for ``seconds`` deletes the row. It measures this time with its own clock, so
    clocks are never compared.
    """

    name = models.UUIDField(unique=True)
    application = models.CharField(max_length=MAX_NAME_LENGTH)
    consumer = models.CharField(max_length=MAX_NAME_LENGTH)
    beat = models.BigIntegerField(default=0)
    seconds = models.FloatField(help_text="Its leases expire after this time without a heartbeat.")

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["application", "consumer"], name="workers_of_a_consumer")]

    def __str__(self) -> str:
        return f"{self.name} of {self.consumer} of {self.application}"


class PartitionLease(models.Model):
    """The worker that leases a partition for a consumer. The partition is free if this worker has no row."""

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
