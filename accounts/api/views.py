"""The REST API of Pulse users, owners and tokens. The functions it calls check what the user may do."""

from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework import request as rest
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts import queue_effects
from accounts.access import tokens, vouching
from accounts.api.serializers import (
    AddressSerializer,
    AdoptionSerializer,
    AskSerializer,
    BelongingsSerializer,
    ConnectionSerializer,
    InvitationSerializer,
    MadePulseUserSerializer,
    MadeTokenSerializer,
    MeSerializer,
    NewPasswordSerializer,
    NewPulseUserSerializer,
    NewTokenSerializer,
    OwnerDetailSerializer,
    OwnerSerializer,
    PasswordSerializer,
    PulseUserChangesSerializer,
    PulseUserDetailSerializer,
    PulseUserSerializer,
    ReasonSerializer,
    TokenSerializer,
    VouchSerializer,
    WithdrawSerializer,
)
from accounts.models import (
    UNCHANGED,
    AuthToken,
    Invitation,
    Owner,
    PulseUser,
    normalize_address,
    owners_matching,
)
from accounts.pulse_users import (
    addresses,
    creation,
    invitations,
    ownership,
    passwords,
    removal,
    thresholds,
    validation,
    withdrawal,
)
from core.confirmation import ConfirmationRequired
from core.endpoints import (
    SEARCH,
    SHOWN_ONCE,
    ConfirmSerializer,
    StrictParameters,
    at_field,
    name_in,
    page_of,
    read,
    search_in,
    takes,
)
from rabbit.errors import BrokerError, NotOnBroker


class Request(rest.Request):
    """A request of a signed-in owner. All endpoints refuse other requests."""

    user: Owner


class PulseUsers(StrictParameters, mixins.ListModelMixin, GenericViewSet[PulseUser]):
    """Pulse users: your own; for operators, all."""

    serializer_class = PulseUserSerializer
    lookup_field = "username"
    tells_secrets = ("create", "rotate_password")

    def get_queryset(self) -> QuerySet[PulseUser]:
        seen = PulseUser.objects.seen_by(self.request.user)
        if self.action == "list" and (search := search_in(self.request)):
            seen = seen.search(search)
        return seen.with_people()

    @takes(SEARCH)
    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List your Pulse users.

        Operators see all Pulse users.
        """
        return super().list(request, *args, **kwargs)

    @extend_schema(request=NewPulseUserSerializer, responses={201: MadePulseUserSerializer, 409: None, 503: None})
    def create(self, request: Request) -> Response:
        """Create a Pulse user on the broker.

        The Pulse user may use the queues `queue/NAME/…` and the exchanges `exchange/NAME/…`. If you give no password,
        one is generated and shown in this response only. You become an owner, unless you are an operator and name other
        owners. Other owners are invited, and become owners when they accept; an operator assigns them. Notification
        addresses get nothing until they are confirmed.
        """
        vouching.require_vouched(request.user)
        body = read(NewPulseUserSerializer, request)
        owners = ownership.find_owners(body.get("owners", []))
        if not (owners and request.user.is_staff):
            owners = [request.user, *(owner for owner in owners if owner != request.user)]
        own_password = body.get("password")
        pulse_user, password = creation.create_pulse_user(
            body["username"], owners, own_password, body.get("notification_emails", []), by=request.user,
            adopt_namespace=body["adopt_namespace"],
        )  # fmt: skip
        data = self.get_serializer(PulseUser.objects.with_people().get(pk=pulse_user.pk)).data
        if own_password is None:
            data["password"] = password
        return Response(data, HTTPStatus.CREATED, headers={**SHOWN_ONCE, "Location": str(data["url"])})

    @extend_schema(responses=PulseUserDetailSerializer)
    def retrieve(self, request: Request, username: str) -> Response:
        """Show a Pulse user and its permissions on the broker.

        An address gets notifications once it is confirmed.
        """
        return self._shown(self.get_object())

    @extend_schema(
        request=PulseUserChangesSerializer, responses={200: PulseUserDetailSerializer, 409: ConfirmationRequired}
    )
    def partial_update(self, request: Request, username: str) -> Response:
        """Change a Pulse user's owners, addresses, thresholds, archives or hold-off.

        Fields that you leave out keep their values. Either all changes are made, or none.

        New owners in `owners` are invited, and become owners when they accept; `invited` lists the open invitations.
        Operators assign owners instead. Owners who are missing from the list are removed, and invitations to others
        are withdrawn. If the list has new owners only, the present ones stay until you repeat the request after
        one of them has accepted. A removed owner may know the password: change it with `rotate-password/`.

        Operators can set thresholds; owners can if the installation allows it. 409: with these thresholds, the next
        pass would delete queues. To confirm it, send the same request with `confirm`.
        """
        pulse_user = self.get_object()
        body = read(PulseUserChangesSerializer, request)
        with transaction.atomic():
            if "owners" in body:
                ownership.set_owners(pulse_user, ownership.find_owners(body["owners"]), request.user)
            if "notification_emails" in body:
                addresses.set_addresses(pulse_user, body["notification_emails"], request.user)
            if "warn_length" in body or "max_length" in body:
                warn, limit = (body.get(name, UNCHANGED) for name in ("warn_length", "max_length"))
                with at_field("max_length" if "max_length" in body else "warn_length"):
                    thresholds.set_thresholds(pulse_user, warn, limit, request.user, body.get("confirm", ""))
            if options := {name: body[name] for name in ("keeps_archives", "hold_off_minutes") if name in body}:
                thresholds.set_options(pulse_user, **options)
        # From all Pulse users: a user who is no longer an owner can't see this one any more.
        return self._shown(PulseUser.objects.with_people().get(pk=pulse_user.pk))

    @extend_schema(request=ConfirmSerializer, responses={202: None, 204: None, 409: ConfirmationRequired, 503: None})
    def destroy(self, request: Request, username: str) -> Response:
        """Delete a Pulse user, with its queues and exchanges on the broker.

        204: everything is deleted. 202: the deletion has started and finishes within minutes. 503: nothing was
        deleted. 409: it has queues. To confirm that they are deleted, send the same request with `confirm`.
        """
        pulse_user = self.get_object()
        confirm = read(ConfirmSerializer, request).get("confirm", "")
        try:
            change = queue_effects.removal_of([pulse_user], request.user, confirm)
            removal.remove_pulse_user(pulse_user, change, request.user)
        except removal.RemovalPending:
            return Response(status=HTTPStatus.ACCEPTED)
        except BrokerError:
            if PulseUser.objects.filter(pk=pulse_user.pk, removing_since=None).exists():
                raise
            return Response(status=HTTPStatus.ACCEPTED)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=NewPasswordSerializer, responses={200: PasswordSerializer, 409: None, 503: None})
    @action(detail=True, methods=["post"], url_path="rotate-password")
    def rotate_password(self, request: Request, username: str) -> Response:
        """Change the password of a Pulse user.

        Permissions and queues don't change. Live connections stay open, unless you ask to close them. Programs that
        connect again need the new password. So that they can have it before, send `later`: the response has a password
        that is not set yet, and the text `prepared`, with which you set it.
        """
        pulse_user = self.get_object()
        body = read(NewPasswordSerializer, request)
        own_password, prepared = body.get("password"), body["prepared"]
        if body["later"]:
            if own_password is not None or prepared:
                raise ValidationError({"later": ["Leave out `password` and `prepared`."]})
            password, prepared = passwords.prepare_password(pulse_user, request.user)
            return Response(
                {"username": pulse_user.username, "password": password, "prepared": prepared}, headers=SHOWN_ONCE
            )
        password = passwords.rotate_password(
            pulse_user, own_password, prepared=prepared, close_connections=body["close_connections"], by=request.user
        )
        data = {"username": pulse_user.username}
        if own_password is None and not prepared:
            data["password"] = password
        return Response(data, headers=SHOWN_ONCE)

    @extend_schema(responses={200: ConnectionSerializer(many=True), 503: None})
    @action(detail=True)
    def connections(self, request: Request, username: str) -> Response:
        """List a Pulse user's live connections."""
        found = passwords.connections_of(self.get_object())
        return page_of(self, ConnectionSerializer, sorted(found, key=lambda connection: connection.name))

    @extend_schema(
        parameters=[OpenApiParameter("name", str, required=True, description="Its full name, percent-encoded.")],
        responses={204: None, 409: None, 503: None},
    )
    @connections.mapping.delete
    def close_connection(self, request: Request, username: str) -> Response:
        """Close a live connection of a Pulse user.

        Its program may connect again at once.
        """
        passwords.close_connection(self.get_object(), name_in(request, "connection"), request.user)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(responses={200: BelongingsSerializer, 503: None})
    @action(detail=True)
    def belongings(self, request: Request, username: str) -> Response:
        """List the queues and exchanges that are deleted with a Pulse user."""
        return Response(BelongingsSerializer(removal.belongings_of(self.get_object())).data)

    @extend_schema(request=AddressSerializer, responses={204: None})
    @action(detail=True, methods=["post"], url_path="ask-again")
    def ask_again(self, request: Request, username: str) -> Response:
        """Send another request to confirm to an address of a Pulse user.

        A confirmed address gets no request. An address gets at most one request an hour.
        """
        pulse_user = self.get_object()
        email = normalize_address(read(AddressSerializer, request)["email"])
        present = {normalize_address(one.email): one for one in pulse_user.notification_addresses.all()}
        address = present.get(email)
        if address is None:
            raise ValidationError({"email": ["The Pulse user has no such address."]})
        addresses.resend_confirmation(address)
        return Response(status=HTTPStatus.NO_CONTENT)

    def _shown(self, pulse_user: PulseUser) -> Response:
        try:
            permissions = validation.permissions_of(pulse_user)
        except BrokerError:
            permissions = None
        context = {**self.get_serializer_context(), "permissions": permissions}
        return Response(PulseUserDetailSerializer(pulse_user, context=context).data)


@extend_schema_view(
    list=extend_schema(
        summary="List the open invitations to you",
        description="An invitation is open for seven days, while its inviter owns the Pulse user.",
    ),
    retrieve=extend_schema(summary="Show an open invitation to you"),
)
class Invitations(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Invitation]):
    """Invitations to the user to own Pulse users."""

    serializer_class = InvitationSerializer
    lookup_field = "uuid"

    def get_queryset(self) -> QuerySet[Invitation]:
        """Return the open invitations to the user. Operators see no others, either."""
        return Invitation.objects.received_by(self.request.user)

    @extend_schema(request=None, responses={204: None, 400: None})
    @action(detail=True, methods=["post"])
    def accept(self, request: Request, uuid: str) -> Response:
        """Accept an invitation. You become an owner of the Pulse user."""
        invitations.accept(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=None, responses={204: None})
    @action(detail=True, methods=["post"])
    def decline(self, request: Request, uuid: str) -> Response:
        """Decline an invitation. The inviter is notified."""
        invitations.decline(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)


class Owners(StrictParameters, mixins.ListModelMixin, GenericViewSet[Owner]):
    """Owners: for operators, all; for others who may approve access, those who request it."""

    serializer_class = OwnerSerializer
    lookup_field = "uuid"

    def get_queryset(self) -> QuerySet[Owner]:
        if not vouching.may_vouch(self.request.user):
            return Owner.objects.none()
        seen = vouching.listed_owners() if self.request.user.is_staff else vouching.open_requests()
        if self.action == "list" and (search := search_in(self.request)):
            seen = seen.filter(owners_matching(search))
        return seen

    @extend_schema(responses={200: OwnerSerializer(many=True), 403: None})
    @takes(OpenApiParameter("search", str, description="Part of the name or the address."))
    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List owners.

        Operators see all owners. Others who may approve access see the owners who request it. Everybody else gets 403.
        """
        if not vouching.may_vouch(request.user):
            raise PermissionDenied("Only owners who may approve access can see this list.")
        return super().list(request, *args, **kwargs)

    @extend_schema(responses=OwnerDetailSerializer)
    def retrieve(self, request: Request, uuid: str) -> Response:
        """Show an owner, with the access record."""
        return Response(OwnerDetailSerializer(self._found()).data)

    @extend_schema(request=ReasonSerializer, responses=OwnerDetailSerializer)
    @action(detail=True, methods=["post"])
    def vouch(self, request: Request, uuid: str) -> Response:
        """Approve an owner's access to the broker."""
        owner = self.get_object()
        vouching.vouch(owner, request.user, read(ReasonSerializer, request).get("reason", ""))
        return Response(OwnerDetailSerializer(self._found(owner)).data)

    @extend_schema(request=VouchSerializer, responses={204: None})
    @action(detail=False, methods=["post"], url_path="vouch")
    def vouch_for(self, request: Request) -> Response:
        """Approve access to the broker for the owner with an e-mail address.

        For operators; for owners with access if the installation allows it. Only operators learn whether anybody has
        signed in with the address. For others, 204 means: if there is such an owner, they have access now, unless an
        operator withdrew it.
        """
        vouching.require_may_vouch(request.user)
        body = read(VouchSerializer, request)
        vouching.vouch_for_address(body["email"], request.user, body.get("reason", ""))
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=WithdrawSerializer, responses={200: OwnerDetailSerializer, 409: ConfirmationRequired})
    @action(detail=True, methods=["post"])
    def withdraw(self, request: Request, uuid: str) -> Response:
        """Withdraw an owner's access to the broker.

        For operators. The owner can't create new Pulse users and tokens any more. With `remove`, existing ones are
        removed too. 409: queues are deleted with them. To confirm it, send the same request with `confirm`.
        """
        owner = self.get_object()
        withdrawal.withdraw(owner, request.user, **read(WithdrawSerializer, request))
        return Response(OwnerDetailSerializer(self._found(owner)).data)

    @extend_schema(
        operation_id="owners_adoptable",
        responses={(200, "application/json"): {"type": "array", "items": {"type": "string"}}, 403: None, 503: None},
    )
    @action(detail=False, url_path="adopt", pagination_class=None)
    def adoptable(self, request: Request) -> Response:
        """List the users of the broker that can be adopted.

        For operators. They were created manually and have no owners here.
        """
        validation.require_operator(request.user)
        return Response(creation.adoptable())

    @extend_schema(request=AdoptionSerializer, responses={201: PulseUserSerializer, 409: None, 503: None})
    @adoptable.mapping.post
    def adopt(self, request: Request) -> Response:
        """Assign owners to a user that was created manually on the broker.

        For operators. The user keeps its password and permissions.
        """
        validation.require_operator(request.user)  # before any errors of the body are reported
        body = read(AdoptionSerializer, request)
        owners = ownership.find_owners(body["owners"])
        try:
            pulse_user = creation.adopt_pulse_user(body["username"], owners, request.user)
        except NotOnBroker as error:
            raise ValidationError({"username": ["The broker has no such user."]}) from error
        data = PulseUserSerializer(pulse_user, context=self.get_serializer_context()).data
        return Response(data, HTTPStatus.CREATED, headers={"Location": str(data["url"])})

    def _found(self, owner: Owner | None = None) -> Owner:
        """Return the given owner, or the one in the path, from the database with the vouching record."""
        pk = (owner or self.get_object()).pk
        return Owner.objects.prefetch_related("vouchings__by").get(pk=pk)


@extend_schema_view(
    list=extend_schema(summary="List your tokens, without their secrets", description="Needs a session."),
    retrieve=extend_schema(summary="Show a token, without its secret", description="Needs a session."),
)
class Tokens(StrictParameters, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[AuthToken]):
    """The user's tokens."""

    serializer_class = TokenSerializer
    lookup_field = "uuid"
    tells_secrets = ("create",)

    def get_queryset(self) -> QuerySet[AuthToken]:
        """Return the user's own tokens. Operators see no others, either."""
        return AuthToken.objects.filter(user=self.request.user.pk).select_related("pulse_user")

    @extend_schema(request=NewTokenSerializer, responses={201: MadeTokenSerializer})
    def create(self, request: Request) -> Response:
        """Create a token for this API.

        The token is shown in this response only. Needs a session.
        """
        vouching.require_vouched(request.user)
        body = read(NewTokenSerializer, request)
        row, token = tokens.create_token(
            request.user, body["name"], body["days"], body["scope"], body["pulse_user"] or ""
        )
        return Response({**self.get_serializer(row).data, "token": token}, HTTPStatus.CREATED, headers=SHOWN_ONCE)

    @extend_schema(request=ConfirmSerializer, responses={204: None, 409: ConfirmationRequired})
    def destroy(self, request: Request, uuid: str) -> Response:
        """Revoke a token.

        With a session, any token of yours; with a token, only itself. 409, with a session: it is your last valid token,
        and your agents have queues. To confirm that the next clean-up deletes them, send the same request with
        `confirm`.
        """
        token = self.get_object()
        if request.auth is None:
            confirm = read(ConfirmSerializer, request).get("confirm", "")
            tokens.revoke_confirmed([token], tokens.revocation_of([token], request.user, confirm))
        else:
            tokens.revoke_token(token)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(operation_id="tokens_revoke_current", responses={204: None, 404: None})
    @action(detail=False, methods=["delete"], url_path="current")
    def destroy_current(self, request: Request) -> Response:
        """Revoke the token that sends this request.

        404: the request has a session instead.
        """
        if not isinstance(request.auth, AuthToken):
            raise Http404
        tokens.revoke_token(request.auth)
        return Response(status=HTTPStatus.NO_CONTENT)


class Me(StrictParameters, GenericViewSet[Owner]):
    """The user."""

    serializer_class = MeSerializer
    pagination_class = None

    @extend_schema(operation_id="me")
    def retrieve(self, request: Request) -> Response:
        """Show who you are, and whether you have access to the broker."""
        return Response(self.get_serializer(request.user).data)

    @extend_schema(request=AskSerializer, responses={204: None, 409: None})
    def ask(self, request: Request) -> Response:
        """Request access to the broker, at most once a day."""
        body = read(AskSerializer, request)
        with at_field("reason"):
            vouching.request_vouching(request.user, body["reason"])
        return Response(status=HTTPStatus.NO_CONTENT)
