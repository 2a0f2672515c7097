"""Fields of serializers."""

from typing import Any

from django.urls import reverse
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from accounts.models import MAX_ADDRESS_LENGTH, MAX_THRESHOLD, Owner
from accounts.pulse_users.validation import MAX_PASSWORD_LENGTH
from core.links import absolute_url, object_url


@extend_schema_field({"type": "string", "pattern": "^[0-9a-f]{32}$", "example": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e"})
class HexUUIDField(serializers.UUIDField):
    """A UUID, written as 32 hex digits."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(format="hex", read_only=True, **kwargs)


class OwnerEmailField(serializers.SlugRelatedField[Owner]):
    """An owner, represented by the e-mail address."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(slug_field="email", read_only=True, **kwargs)


class CanonicalURLField(serializers.HyperlinkedIdentityField):
    """The URL of a resource, built from GUARDIAN_BASE_URL instead of the request's host."""

    def to_representation(self, value: Any) -> str:  # type: ignore[override]  # not the library's subclass of str
        return absolute_url(reverse(self.view_name, args=[getattr(value, self.lookup_field)]))


@extend_schema_field({"type": "string", "format": "uri"})
class HexURLField(serializers.ReadOnlyField):
    """The URL of the object itself, or of its ``source``, that contains the UUID as 32 hex digits."""

    def __init__(self, view_name: str, source: str = "*", **kwargs: Any) -> None:
        super().__init__(source=source, **kwargs)
        self.view_name = view_name

    def to_representation(self, value: Any) -> str:
        return object_url(self.view_name, value.uuid)


@extend_schema_field({"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9._-]{0,99}$", "example": "alice"})
class UserNameField(serializers.CharField):
    """The name of a Pulse user, taken literally. ``rabbit.names`` validates it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(trim_whitespace=False, **kwargs)


class PasswordField(serializers.CharField):
    """A password of one's own, taken literally."""

    def __init__(self) -> None:
        super().__init__(
            required=False,
            write_only=True,
            trim_whitespace=False,
            max_length=MAX_PASSWORD_LENGTH,
            help_text="Default: a generated password.",
        )


class ThresholdField(serializers.IntegerField):
    """A threshold in messages; null: the policy's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=1, max_value=MAX_THRESHOLD, allow_null=True, required=False, **kwargs)


class AddressesField(serializers.ListField):
    """E-mail addresses."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(child=serializers.EmailField(max_length=MAX_ADDRESS_LENGTH), required=False, **kwargs)
