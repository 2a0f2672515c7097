"""Filters of agents' lists by UUIDs, times and addresses."""

from datetime import UTC, datetime
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django_filters import CharFilter, IsoDateTimeFilter, UUIDFilter  # type: ignore[import-untyped]
from django_filters.fields import IsoDateTimeField  # type: ignore[import-untyped]

from accounts.models import normalize_address
from agents.registration import identities


class StrictUUIDFormField(forms.UUIDField):
    """A UUID in a filter: 32 hex digits, with or without dashes."""

    def to_python(self, value: Any) -> Any:
        if value in self.empty_values:
            return None
        try:
            return identities.read_uuid(value)
        except ValueError as error:
            raise ValidationError(str(error)) from error


class StrictUUIDFilter(UUIDFilter):  # type: ignore[misc]  # the library has no types
    """Filters by a UUID in the notation that bodies have."""

    field_class = StrictUUIDFormField


class TimeFormField(IsoDateTimeField):  # type: ignore[misc]  # the library has no types
    """A time in a filter."""

    def to_python(self, value: Any) -> datetime | None:
        time: datetime | None = super().to_python(value)
        try:
            return time if time is None else time.astimezone(UTC)
        except OverflowError as error:
            raise ValidationError("The time must be in a year from 1 to 9999, in UTC.") from error


class TimeFilter(IsoDateTimeFilter):  # type: ignore[misc]  # the library has no types
    """Filters by a time."""

    field_class = TimeFormField


class AddressFilter(CharFilter):  # type: ignore[misc]  # the library has no types
    """Filters by an e-mail address, in whatever form it is written."""

    def filter(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return rows.filter(**{f"{self.field_name}__in": [value, normalize_address(value)]}) if value else rows
