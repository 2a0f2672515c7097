"""Leases, and objects to be removed from the broker."""

from django.db import models
from django.db.models.functions import Now

from core.fields import BrokerNameField


class Lease(models.Model):
    """The right to do something that only one process may do at a time. See ``core/leases.py``."""

    name = models.CharField(max_length=300, primary_key=True)
    holder = models.UUIDField(null=True)
    expires_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.name


class Removal(models.Model):
    """A thing to be removed from the broker. Carried out in ``core/removals.py``."""

    class Kind(models.TextChoices):
        PASSWORD = "password", "RabbitMQ user's password"
        USER = "user", "RabbitMQ user"
        VHOST = "vhost", "vhost, with everything in it"
        QUEUE = "queue", "queue"
        PULSE_USER = "account", "Pulse user, with its queues and exchanges"

    kind = models.CharField(max_length=10, choices=Kind.choices)
    vhost = BrokerNameField(max_length=255, blank=True, help_text="Of a queue.")
    name = BrokerNameField(max_length=255)
    if_unused = models.BooleanField(default=False, help_text="Delete the queue only if it has no consumers.")
    created = models.DateTimeField(auto_now_add=True)
    due_at = models.DateTimeField(db_default=Now(), help_text="No process attempts it before this time.")
    claim = models.UUIDField(null=True, help_text="The process that carries it out.")
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["kind", "vhost", "name"], name="one_removal_of_a_thing")]
        indexes = [models.Index(fields=["due_at"])]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.name}"
