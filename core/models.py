"""Leases: which process may do what only one may do at a time."""

from django.db import models
from django.db.models.functions import Now


class Lease(models.Model):
    """Who may do a thing that only one process may do at a time. Taken and renewed in ``core/leases.py``."""

    name = models.CharField(max_length=300, primary_key=True)
    holder = models.UUIDField(null=True)
    expires_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.name
