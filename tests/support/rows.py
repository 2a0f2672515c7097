"""Rows of any model, with values that mean nothing."""

from datetime import UTC, datetime
from uuid import uuid4

from django.db import models

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def create_row(model, alias, made, *, is_full=False):
    """Create a row with the rows that it references, and return it. ``is_full``: also with those that it may lack."""
    values = {}
    for field in model._meta.concrete_fields:
        if field.is_relation and (is_full or not field.null):
            values[field.name] = create_row(field.remote_field.model, alias, made, is_full=is_full)
        elif field.auto_created or (field.has_default() and callable(field.default)):
            continue
        elif field.unique or not (field.has_default() or field.null):
            values[field.name] = sample_value(field, len(made))
    row = model._base_manager.using(alias).create(**values)
    made.append(row)
    return row


def sample_value(field, number):
    if isinstance(field, models.UUIDField):
        return uuid4()
    if isinstance(field, models.DateTimeField):
        return MOMENT
    if isinstance(field, models.BooleanField):
        return True
    if isinstance(field, models.IntegerField | models.FloatField):
        return number
    if isinstance(field, models.JSONField):
        return {"number": number}
    if isinstance(field, models.BinaryField):
        return b"\x00\xff"
    return f"{field.name[:3]}-{number}"[: field.max_length]
