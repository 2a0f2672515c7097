"""Which messages were processed, so that a redelivery isn't worked on again; see `guardian_consumers.django.once`."""

from datetime import timedelta

from django.db import models
from django.db.models.functions import Now
from django.utils import timezone

BATCH = 500


class ProcessedQuerySet(models.QuerySet["Processed"]):
    """Processed messages."""

    def prune(self, keep: timedelta) -> int:
        """Remove some of what is older than this, and return how many; ``BATCH``: there may be more."""
        old = self.filter(at__lt=timezone.now() - keep).order_by("at")
        ids = list(old.values_list("pk", flat=True)[:BATCH])
        return self.filter(pk__in=ids).delete()[0] if ids else 0


class Processed(models.Model):
    """A message whose work is committed: the row is written in the same transaction."""

    consumer = models.CharField(max_length=255, help_text="The name of its logical queue.")
    message_id = models.CharField(max_length=255, help_text="What tells the message from others.")
    at = models.DateTimeField(db_default=Now())
    publications = models.JSONField(null=True, help_text="What is still to be published because of it; empty: nothing.")

    objects = ProcessedQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "processed messages"
        constraints = [
            models.UniqueConstraint(
                fields=["consumer", "message_id"], name="consumers_one_processed_row_for_each_message"
            )
        ]
        indexes = [models.Index(fields=["at"], name="consumers_processed_at")]

    def __str__(self) -> str:
        return f"{self.message_id} by {self.consumer}"
