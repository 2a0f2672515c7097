"""Serializers of owners, tokens and Pulse users."""

from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from accounts.access import vouching
from accounts.access.tokens import DEFAULT_DAYS, MAX_DAYS, MAX_NAME_LENGTH
from accounts.access.vouching import MAX_REASON_LENGTH, MAX_REQUEST_LENGTH
from accounts.api.fields import (
    AddressesField,
    CanonicalURLField,
    HexUUIDField,
    OwnerEmailField,
    PasswordField,
    ThresholdField,
    UserNameField,
)
from accounts.models import (
    MAX_ADDRESS_LENGTH,
    AuthToken,
    Invitation,
    NotificationAddress,
    Owner,
    PulseUser,
    Vouching,
)
from accounts.pulse_users.addresses import MAX_ADDRESSES
from accounts.pulse_users.ownership import MAX_OWNERS
from accounts.pulse_users.thresholds import MAX_HOLD_OFF_MINUTES
from core.endpoints import ConfirmField
from rabbit.entities import Connection
from rabbit.permissions import Permissions, in_words

ALICE = {
    "username": "alice",
    "url": "https://guardian.example.org/api/pulse-users/alice/",
    "owners": ["alice@example.org"],
    "invited": ["bob@example.org"],
    "notification_emails": ["team@example.org"],
    "notification_addresses": [
        {
            "email": "team@example.org",
            "added_by": "alice@example.org",
            "created": "2026-01-05T09:00:00Z",
            "confirmed_at": None,
        }
    ],
    "warn_length": None,
    "max_length": None,
    "keeps_archives": True,
    "hold_off_minutes": 0,
    "ready": True,
    "created": "2026-01-05T09:00:00Z",
    "removing_since": None,
    "password_exposed_at": None,
}
INVITATION = {
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
    "pulse_user": "alice",
    "inviter": "alice@example.org",
    "created": "2026-01-05T09:00:00Z",
    "expires_at": "2026-01-12T09:00:00Z",
}


OWNER = {
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
    "email": "alice@example.org",
    "full_name": "Alice",
    "operator": False,
    "active": True,
    "vouched": True,
    "joined": "2026-01-05T09:00:00Z",
    "vouch_requested_at": None,
    "vouch_request": "",
}
VOUCHING = {"vouched": True, "by": "ops@example.org", "reason": "works with us", "at": "2026-01-05T10:00:00Z"}
TOKEN = {
    "uuid": "8d9c5b7ef0a14c5f9e0a4f6b6f7c8d9e",
    "name": "the agent in the cellar",
    "created": "2026-01-05T09:00:00Z",
    "expires": "2027-01-05T09:00:00Z",
    "last_used": None,
    "scope": "agent",
    "pulse_user": None,
}


# Pulse users


class NotificationAddressSerializer(serializers.ModelSerializer[NotificationAddress]):
    """A further notification address of a Pulse user. It gets notifications once it is confirmed."""

    added_by = OwnerEmailField(allow_null=True)

    class Meta:
        model = NotificationAddress
        fields = ["email", "added_by", "created", "confirmed_at"]
        read_only_fields = fields


@extend_schema_serializer(examples=[OpenApiExample("A Pulse user", ALICE, response_only=True)])
class PulseUserSerializer(serializers.ModelSerializer[PulseUser]):
    """A Pulse user."""

    url = CanonicalURLField(view_name="api-pulse-user-detail", lookup_field="username")
    owners = OwnerEmailField(many=True)
    invited = serializers.SerializerMethodField(help_text="Who was invited to own it, and has not answered yet.")
    notification_emails = serializers.SerializerMethodField(
        help_text="Further addresses for notifications. An address gets them once it is confirmed."
    )
    notification_addresses = NotificationAddressSerializer(many=True, read_only=True)

    class Meta:
        model = PulseUser
        fields = [
            "username", "url", "owners", "invited", "notification_emails", "notification_addresses", "warn_length",
            "max_length", "keeps_archives", "hold_off_minutes", "ready", "created", "removing_since",
            "password_exposed_at",
        ]  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(serializers.ListField(child=serializers.EmailField()))
    def get_invited(self, pulse_user: PulseUser) -> list[str]:
        """Return the addresses of the open invitations, which the view fetched (``with_people``)."""
        return [invitation.invitee.email for invitation in pulse_user.invitations.all()]

    def get_notification_emails(self, pulse_user: PulseUser) -> list[str]:
        return [address.email for address in pulse_user.notification_addresses.all()]


@extend_schema_serializer(examples=[OpenApiExample("An invitation", INVITATION, response_only=True)])
class InvitationSerializer(serializers.ModelSerializer[Invitation]):
    """An open invitation to own a Pulse user."""

    uuid = HexUUIDField()
    pulse_user = serializers.SlugRelatedField[PulseUser](slug_field="username", read_only=True)
    inviter = OwnerEmailField()
    expires_at = serializers.DateTimeField(read_only=True)

    class Meta:
        model = Invitation
        fields = ["uuid", "pulse_user", "inviter", "created", "expires_at"]
        read_only_fields = fields


class PermissionsSerializer(serializers.Serializer[Any]):
    """The permissions of a Pulse user on one vhost: the broker's three patterns, and their meaning."""

    vhost = serializers.CharField()
    configure = serializers.CharField()
    write = serializers.CharField()
    read = serializers.CharField()
    in_words = serializers.ListField(child=serializers.CharField())


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "A Pulse user",
            {
                **ALICE,
                "permissions": [
                    {
                        "vhost": "/",
                        "configure": "^(queue/alice/.*|exchange/alice/.*)",
                        "write": "^(queue/alice/.*|exchange/alice/.*)",
                        "read": "^(queue/alice/.*|exchange/.*)",
                        "in_words": ["Can create and delete queues whose names start with queue/alice/."],
                    }
                ],
            },
            response_only=True,
        )
    ]
)
class PulseUserDetailSerializer(PulseUserSerializer):
    """A Pulse user, with its permissions on the broker."""

    permissions = serializers.SerializerMethodField(help_text="By vhost; null if the broker is unreachable.")

    class Meta(PulseUserSerializer.Meta):
        fields = [*PulseUserSerializer.Meta.fields, "permissions"]
        read_only_fields = fields

    @extend_schema_field(PermissionsSerializer(many=True, allow_null=True))
    def get_permissions(self, pulse_user: PulseUser) -> list[dict[str, Any]] | None:
        by_vhost: dict[str, Permissions] | None = self.context["permissions"]
        if by_vhost is None:
            return None
        return [
            {"vhost": vhost, **permissions._asdict(), "in_words": in_words(permissions, pulse_user.username)}
            for vhost, permissions in sorted(by_vhost.items())
        ]


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "With a generated password",
            {"username": "alice", "notification_emails": ["team@example.org"]},
            request_only=True,
        )
    ]
)
class NewPulseUserSerializer(serializers.Serializer[Any]):
    """A new Pulse user."""

    username = UserNameField(
        help_text="Starts with a letter; letters, digits, '.', '_' and '-'; at most 100 characters."
    )
    password = PasswordField()
    owners = AddressesField(
        min_length=1,
        max_length=MAX_OWNERS,
        help_text="E-mail addresses of the owners. Default: you. Others are invited.",
    )
    notification_emails = AddressesField(max_length=MAX_ADDRESSES, help_text="Further addresses for notifications.")
    adopt_namespace = serializers.BooleanField(
        default=False,
        help_text="For operators: whether it gets the queues and exchanges of its name that the broker has. "
        "Otherwise such a name is refused.",
    )


@extend_schema_serializer(
    examples=[OpenApiExample("Another owner", {"owners": ["alice@example.org", "bob@example.org"]}, request_only=True)]
)
class PulseUserChangesSerializer(serializers.Serializer[Any]):
    """Changes to a Pulse user. Fields that are left out keep their values."""

    owners = AddressesField(
        max_length=MAX_OWNERS, help_text="The new list of owners; at least one. New owners are invited."
    )
    notification_emails = AddressesField(
        max_length=MAX_ADDRESSES, help_text="The new list of further addresses. New addresses are asked to confirm."
    )
    warn_length = ThresholdField(help_text="Warning threshold, in messages; null: the policy's.")
    max_length = ThresholdField(help_text="Deletion limit, in messages; null: the policy's.")
    keeps_archives = serializers.BooleanField(
        required=False, help_text="Whether the messages of its deleted and purged queues are archived."
    )
    hold_off_minutes = serializers.IntegerField(
        required=False,
        min_value=0,
        max_value=MAX_HOLD_OFF_MINUTES,
        help_text="How many minutes a queue must be over its warning threshold before its owners are warned.",
    )
    confirm = ConfirmField()


@extend_schema_serializer(
    examples=[
        OpenApiExample(
            "With a generated password",
            {**ALICE, "password": "vSfV4ztsQfsvPn4UwZ2H8kNW0TqE7xGd"},
            response_only=True,
        )
    ]
)
class MadePulseUserSerializer(PulseUserSerializer):
    """A Pulse user that was just created."""

    # Not read-only: the schema would say that the field is always present.
    password = serializers.CharField(required=False, help_text="Shown only once, and only if it was generated.")

    class Meta(PulseUserSerializer.Meta):
        fields = [*PulseUserSerializer.Meta.fields, "password"]


class NewPasswordSerializer(serializers.Serializer[Any]):
    """A change of the password."""

    password = PasswordField()
    close_connections = serializers.BooleanField(
        default=False, help_text="Whether to close live connections that used the old password."
    )
    later = serializers.BooleanField(
        default=False, help_text="Whether to get a generated password that is set later, with `prepared`."
    )
    prepared = serializers.CharField(
        default="", write_only=True, max_length=2000, help_text="Sets the password that came with this text."
    )


@extend_schema_serializer(
    examples=[
        OpenApiExample("Generated", {"username": "alice", "password": "vSfV4ztsQfsvPn4UwZ2H8kNW0TqE7xGd"}),
        OpenApiExample("Given by you", {"username": "alice"}),
    ]
)
class PasswordSerializer(serializers.Serializer[Any]):
    """A Pulse user whose password was changed."""

    username = serializers.CharField()
    password = serializers.CharField(required=False, help_text="Shown only once, and only if it was generated.")
    prepared = serializers.CharField(
        required=False, help_text="The password is not set yet. To set it, send this within seven days."
    )


class ConnectionSerializer(serializers.Serializer[Connection]):
    """A live connection of a Pulse user."""

    name = serializers.CharField()
    vhost = serializers.CharField()
    client_address = serializers.CharField()
    connected_at = serializers.DateTimeField(allow_null=True, help_text="Null if the broker doesn't report it.")


class BelongingsSerializer(serializers.Serializer[Any]):
    """The names of the queues and exchanges that are deleted with a Pulse user."""

    queues = serializers.ListField(child=serializers.CharField())
    exchanges = serializers.ListField(child=serializers.CharField())


class AddressSerializer(serializers.Serializer[Any]):
    """One of a Pulse user's addresses."""

    email = serializers.EmailField(max_length=MAX_ADDRESS_LENGTH)


@extend_schema_serializer(
    examples=[OpenApiExample("A Pulse user", {"username": "old-worker", "owners": ["alice@example.org"]})]
)
class AdoptionSerializer(serializers.Serializer[Any]):
    """An existing user of the broker, and its future owners."""

    username = UserNameField()
    owners = serializers.ListField(
        child=serializers.EmailField(max_length=MAX_ADDRESS_LENGTH), min_length=1, max_length=MAX_OWNERS
    )


# Owners


class VouchingSerializer(serializers.ModelSerializer[Vouching]):
    """A record that an owner's access to the broker was approved or withdrawn."""

    by = OwnerEmailField(allow_null=True, help_text="Null: by a rule, which the reason names.")

    class Meta:
        model = Vouching
        fields = ["vouched", "by", "reason", "at"]
        read_only_fields = fields


@extend_schema_serializer(examples=[OpenApiExample("An owner", OWNER, response_only=True)])
class OwnerSerializer(serializers.ModelSerializer[Owner]):
    """An owner, as operators see them."""

    uuid = HexUUIDField()
    operator = serializers.BooleanField(source="is_staff")
    active = serializers.BooleanField(source="is_active")
    joined = serializers.DateTimeField(source="date_joined")

    class Meta:
        model = Owner
        fields = [
            "uuid", "email", "full_name", "operator", "active", "vouched", "joined", "vouch_requested_at",
            "vouch_request",
        ]  # fmt: skip
        read_only_fields = fields


@extend_schema_serializer(examples=[OpenApiExample("An owner", {**OWNER, "vouchings": [VOUCHING]}, response_only=True)])
class OwnerDetailSerializer(OwnerSerializer):
    """An owner with the access record, newest first."""

    vouchings = VouchingSerializer(many=True)

    class Meta(OwnerSerializer.Meta):
        fields = [*OwnerSerializer.Meta.fields, "vouchings"]
        read_only_fields = fields


@extend_schema_serializer(
    examples=[OpenApiExample("Alice", {**OWNER, "may_vouch": False, "vouching": VOUCHING}, response_only=True)]
)
class MeSerializer(OwnerSerializer):
    """The user."""

    may_vouch = serializers.SerializerMethodField(help_text="Whether you may approve access for others.")
    vouching = serializers.SerializerMethodField(help_text="The last record of your access; null if there is none.")

    class Meta(OwnerSerializer.Meta):
        fields = [*OwnerSerializer.Meta.fields, "may_vouch", "vouching"]
        read_only_fields = fields

    def get_may_vouch(self, owner: Owner) -> bool:
        return vouching.may_vouch(owner)

    @extend_schema_field(VouchingSerializer(allow_null=True))
    def get_vouching(self, owner: Owner) -> Any:
        last = owner.vouchings.select_related("by").first()
        return None if last is None else VouchingSerializer(last).data


class ReasonSerializer(serializers.Serializer[Any]):
    """The reason of an action."""

    reason = serializers.CharField(required=False, allow_blank=True, max_length=MAX_REASON_LENGTH)


class VouchSerializer(ReasonSerializer):
    """The owner whose access to approve, and the reason."""

    email = serializers.EmailField(max_length=MAX_ADDRESS_LENGTH)


class WithdrawSerializer(ReasonSerializer):
    """The options of a withdrawal."""

    remove = serializers.BooleanField(
        default=False, help_text="Whether to remove the tokens, and the Pulse users that nobody else owns."
    )
    confirm = ConfirmField()


class AskSerializer(serializers.Serializer[Any]):
    """A request for access to the broker."""

    reason = serializers.CharField(max_length=MAX_REQUEST_LENGTH)


# Tokens


@extend_schema_serializer(examples=[OpenApiExample("A token", TOKEN, response_only=True)])
class TokenSerializer(serializers.ModelSerializer[AuthToken]):
    """A token for this API, without its secret."""

    uuid = HexUUIDField()
    expires = serializers.DateTimeField(source="expiry", allow_null=True, read_only=True)
    pulse_user: Any = serializers.SlugRelatedField(slug_field="username", read_only=True, allow_null=True)

    class Meta:
        model = AuthToken
        fields = ["uuid", "name", "created", "expires", "last_used", "scope", "pulse_user"]
        read_only_fields = fields


@extend_schema_serializer(
    examples=[OpenApiExample("For a year", {"name": "the agent in the cellar"}, request_only=True)]
)
class NewTokenSerializer(serializers.Serializer[Any]):
    """A new token."""

    name = serializers.CharField(max_length=MAX_NAME_LENGTH)
    days = serializers.IntegerField(min_value=1, max_value=MAX_DAYS, default=DEFAULT_DAYS)
    scope = serializers.ChoiceField(
        AuthToken.Scope.choices,
        default=AuthToken.Scope.AGENT,
        help_text="`agent`: register queues, as an agent. `read`: every GET, except of tokens and messages. `all`: "
        "everything that you may do, except manage tokens.",
    )
    pulse_user = serializers.CharField(
        default=None,
        allow_null=True,
        max_length=255,
        help_text="With the scope `read`: the name of the only Pulse user that the token reads.",
    )


@extend_schema_serializer(examples=[OpenApiExample("A token", {**TOKEN, "token": 8 * "5f1e9c0a"}, response_only=True)])
class MadeTokenSerializer(TokenSerializer):
    """A token that was just created."""

    token = serializers.CharField(read_only=True, help_text="Shown only once.")

    class Meta(TokenSerializer.Meta):
        fields = [*TokenSerializer.Meta.fields, "token"]
