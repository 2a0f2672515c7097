"""Processed messages, to detect redeliveries; see `guardian_consumers.django.once`."""

from datetime import timedelta

from django.db import models
from django.db.models.functions import Now
from django.utils import timezone

BATCH = 500


class ProcessedQuerySet(models.QuerySet["Processed"]):
    def prune(self, keep: timedelta) -> int:
        """Delete up to ``BATCH`` rows older than this, and return how many."""
        old = self.filter(at__lt=timezone.now() - keep).order_by("at")
        ids = list(old.values_list("pk", flat=True)[:BATCH])
        return self.filter(pk__in=ids).delete()[0] if ids else 0


class Processed(models.Model):
    """A message whose work is committed. The row is inserted in the same transaction."""

    consumer = models.CharField(max_length=255, help_text="The name of its logical queue.")
    message_id = models.CharField(max_length=255, help_text="The message's id, key, or a digest of it.")
    at = models.DateTimeField(db_default=Now())
    publications = models.JSONField(null=True, help_text="Messages of its work that are not yet published.")

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
