"""The REST API of RabbitMQ accounts, owners and tokens. What may be done is decided by the functions it calls."""

import contextlib
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.core.exceptions import ValidationError as InvalidValue
from django.db import transaction
from django.db.models import Prefetch, QuerySet
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins
from rest_framework import request as rest
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts import addresses, pulse_users, removal, tokens, vouching, withdrawal
from accounts.models import (
    UNCHANGED,
    AuthToken,
    NotificationAddress,
    Owner,
    PulseUser,
    normalize_address,
    owners_matching,
)
from accounts.serializers import (
    AddressSerializer,
    AdoptionSerializer,
    AskSerializer,
    BelongingsSerializer,
    ConnectionSerializer,
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
from core.endpoints import SEARCH, SHOWN_ONCE, Conflict, at_field, page_of, read, search_in
from rabbit.management import BrokerError, NotOnBroker
from rabbit.names import InvalidUserName


class Request(rest.Request):
    """A request of somebody who is signed in; all endpoints refuse everybody else."""

    user: Owner


class PulseUsers(mixins.ListModelMixin, GenericViewSet[PulseUser]):
    """RabbitMQ accounts: your own, and all to operators."""

    serializer_class = PulseUserSerializer
    lookup_field = "username"
    filter_backends = []
    tells_secrets = ("create", "rotate_password")

    def get_queryset(self) -> QuerySet[PulseUser]:
        """Return those that the visitor sees, in a list those that are searched for."""
        addresses = NotificationAddress.objects.select_related("added_by")
        seen = PulseUser.objects.seen_by(self.request.user)
        if self.action == "list" and (search := search_in(self.request)):
            seen = seen.search(search)
        return seen.prefetch_related("owners", Prefetch("notification_addresses", addresses))

    @extend_schema(parameters=[SEARCH])
    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List accounts.

        Your own; to operators, all that are known here.
        """
        return super().list(request, *args, **kwargs)

    @extend_schema(request=NewPulseUserSerializer, responses={201: MadePulseUserSerializer, 409: None, 503: None})
    def create(self, request: Request) -> Response:
        """Make an account on the broker.

        It may use the queues `queue/NAME/…` and the exchanges `exchange/NAME/…`. Without a password one is generated,
        and shown in this answer only. You are one of its owners; operators who name others are not. Addresses to be
        notified get nothing before somebody there has confirmed.
        """
        vouching.require_vouched(request.user)
        body = read(NewPulseUserSerializer, request)
        with at_field("owners", InvalidValue):
            owners = pulse_users.find_owners(body.get("owners", []))
        if not (owners and request.user.is_staff):
            owners = [request.user, *(owner for owner in owners if owner != request.user)]
        own_password = body.get("password")
        with at_field("username", InvalidUserName, pulse_users.NameReserved, pulse_users.NameTaken):
            pulse_user, password = pulse_users.create_pulse_user(
                body["username"], owners, own_password, body.get("notification_emails", []), by=request.user
            )
        data = self.get_serializer(pulse_user).data
        if own_password is None:
            data["password"] = password
        return Response(data, HTTPStatus.CREATED, headers={**SHOWN_ONCE, "Location": str(data["url"])})

    @extend_schema(responses=PulseUserDetailSerializer)
    def retrieve(self, request: Request, username: str) -> Response:
        """Show an account, and what it may do on the broker.

        Its addresses are told from when they are confirmed.
        """
        return self._shown(self.get_object())

    @extend_schema(request=PulseUserChangesSerializer, responses=PulseUserDetailSerializer)
    def partial_update(self, request: Request, username: str) -> Response:
        """Change an account's owners, addresses or thresholds.

        What is left out stays. All of it is done, or nothing. Thresholds are for operators, and for owners where
        operators allow it.
        """
        pulse_user = self.get_object()
        body = read(PulseUserChangesSerializer, request)
        with transaction.atomic():
            if "owners" in body:
                with at_field("owners", InvalidValue, pulse_users.LastOwner, pulse_users.NotAnOwner):
                    pulse_users.set_owners(pulse_user, pulse_users.find_owners(body["owners"]))
            if "notification_emails" in body:
                with at_field("notification_emails", InvalidValue):
                    addresses.set_addresses(pulse_user, body["notification_emails"], request.user)
            if "warn_length" in body or "max_length" in body:
                warn, most = (body.get(name, UNCHANGED) for name in ("warn_length", "max_length"))
                with at_field("max_length" if "max_length" in body else "warn_length", InvalidValue):
                    pulse_users.set_thresholds(pulse_user, warn, most, request.user)
        # Asked of all, because whoever gave the account away doesn't see it any more.
        return self._shown(PulseUser.objects.get(pk=pulse_user.pk))

    @extend_schema(responses={202: None, 204: None, 409: None, 503: None})
    def destroy(self, request: Request, username: str) -> Response:
        """Delete an account, with its queues and exchanges on the broker.

        204: all of it is gone. 202: it was begun, and what the broker did not do yet is done within minutes. 503:
        nothing was done.
        """
        pulse_user = self.get_object()
        try:
            removal.remove_pulse_user(pulse_user)
        except removal.GoesOn:
            return Response(status=HTTPStatus.ACCEPTED)
        except BrokerError:
            if PulseUser.objects.filter(pk=pulse_user.pk, removing_since=None).exists():
                raise
            return Response(status=HTTPStatus.ACCEPTED)
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=NewPasswordSerializer, responses={200: PasswordSerializer, 409: None, 503: None})
    def rotate_password(self, request: Request, username: str) -> Response:
        """Give an account another password.

        Permissions, queues and live connections stay as they are, unless the connections are to be closed.
        """
        pulse_user = self.get_object()
        body = read(NewPasswordSerializer, request)
        own_password = body.get("password")
        with at_field("password", InvalidValue):
            password = pulse_users.rotate_password(
                pulse_user, own_password, close_connections=body["close_connections"]
            )
        data = {"username": pulse_user.username}
        if own_password is None:
            data["password"] = password
        return Response(data, headers=SHOWN_ONCE)

    @extend_schema(responses={200: ConnectionSerializer(many=True), 503: None})
    def connections(self, request: Request, username: str) -> Response:
        """List an account's live connections."""
        found = pulse_users.connections_of(self.get_object())
        return page_of(self, ConnectionSerializer, sorted(found, key=lambda connection: connection.name))

    @extend_schema(responses={200: BelongingsSerializer, 503: None})
    def belongings(self, request: Request, username: str) -> Response:
        """Show what is deleted with an account: its queues and exchanges on the broker."""
        return Response(BelongingsSerializer(removal.what_goes(self.get_object())).data)

    @extend_schema(request=AddressSerializer, responses={204: None})
    def ask_again(self, request: Request, username: str) -> Response:
        """Ask an address of an account once more for its confirmation.

        One that has confirmed is not asked. Nobody is asked twice within an hour.
        """
        pulse_user = self.get_object()
        email = normalize_address(read(AddressSerializer, request)["email"])
        with at_field("email", InvalidValue):
            address = pulse_user.notification_addresses.filter(email=email).first()
            if address is None:
                raise InvalidValue("This is no address of the account.")
            addresses.resend_confirmation(address)
        return Response(status=HTTPStatus.NO_CONTENT)

    def _shown(self, pulse_user: PulseUser) -> Response:
        try:
            permissions = pulse_users.permissions_of(pulse_user)
        except BrokerError:
            permissions = None
        context = {**self.get_serializer_context(), "permissions": permissions}
        return Response(PulseUserDetailSerializer(pulse_user, context=context).data)


class Owners(mixins.ListModelMixin, GenericViewSet[Owner]):
    """Owners: all to operators; who asks to be vouched for, to those who may vouch."""

    serializer_class = OwnerSerializer
    lookup_field = "uuid"
    filter_backends = []

    def get_queryset(self) -> QuerySet[Owner]:
        """Return those that the visitor sees."""
        if self.request.user.is_staff:
            return vouching.listed_owners()
        if vouching.may_vouch(self.request.user):
            return Owner.objects.filter(vouch_requested_at__isnull=False, vouched=False, is_active=True)
        return Owner.objects.none()

    def filter_queryset(self, queryset: QuerySet[Owner, Any]) -> QuerySet[Owner, Any]:
        """Return those that are searched for."""
        search = search_in(self.request)
        if self.action == "list" and search:
            return queryset.filter(owners_matching(search))
        return queryset

    @extend_schema(
        parameters=[OpenApiParameter("search", str, description="A part of the name or the address.")],
        responses={200: OwnerSerializer(many=True), 403: None},
    )
    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List owners.

        To operators all. To others who may vouch: who asks for it. Everybody else may not see it.
        """
        if not vouching.may_vouch(request.user):
            raise PermissionDenied("Only those who may vouch for others see this list.")
        return super().list(request, *args, **kwargs)

    @extend_schema(responses=OwnerDetailSerializer)
    def retrieve(self, request: Request, uuid: str) -> Response:
        """Show an owner, with the record of who vouched for them."""
        return Response(OwnerDetailSerializer(self._found()).data)

    @extend_schema(request=ReasonSerializer, responses=OwnerDetailSerializer)
    def vouch(self, request: Request, uuid: str) -> Response:
        """Vouch for an owner, who may then use the broker."""
        owner = self.get_object()
        vouching.vouch(owner, request.user, read(ReasonSerializer, request).get("reason", ""))
        return Response(OwnerDetailSerializer(self._found(owner)).data)

    @extend_schema(operation_id="owners_vouch_for", request=VouchSerializer, responses={204: None})
    def vouch_for(self, request: Request) -> Response:
        """Vouch for somebody by e-mail address.

        For operators, and for owners who are vouched for where operators allow it. These are not told whether anybody
        has signed in with the address: 204 says that whoever has may use the broker now, unless an operator withdrew
        it.
        """
        if not vouching.may_vouch(request.user):
            raise PermissionDenied("You can't vouch for others. Ask an operator.")
        body = read(VouchSerializer, request)
        owner = vouching.find_owner(body["email"])
        if owner is not None:
            with contextlib.nullcontext() if request.user.is_staff else contextlib.suppress(PermissionDenied):
                vouching.vouch(owner, request.user, body.get("reason", ""))
        elif request.user.is_staff:
            raise ValidationError({"email": ["Nobody has signed in with this address yet; ask them to."]})
        return Response(status=HTTPStatus.NO_CONTENT)

    @extend_schema(request=WithdrawSerializer, responses=OwnerDetailSerializer)
    def withdraw(self, request: Request, uuid: str) -> Response:
        """Withdraw what somebody vouched for.

        For operators. No new accounts and tokens can be made then; with `remove`, those that are there go too.
        """
        owner = self.get_object()
        body = read(WithdrawSerializer, request)
        withdrawal.withdraw(owner, request.user, remove=body["remove"], reason=body.get("reason", ""))
        return Response(OwnerDetailSerializer(self._found(owner)).data)

    @extend_schema(
        operation_id="owners_adoptable",
        responses={(200, "application/json"): {"type": "array", "items": {"type": "string"}}, 403: None, 503: None},
    )
    def adoptable(self, request: Request) -> Response:
        """List the accounts on the broker that nobody owns here.

        For operators. They were made by hand, and can be given owners.
        """
        pulse_users.require_operator(request.user)
        return Response(pulse_users.adoptable())

    @extend_schema(request=AdoptionSerializer, responses={201: PulseUserSerializer, 409: None, 503: None})
    def adopt(self, request: Request) -> Response:
        """Give owners to an account that was made on the broker by hand.

        For operators. Its password and permissions stay what they were.
        """
        pulse_users.require_operator(request.user)  # before they hear what would be wrong with the body
        body = read(AdoptionSerializer, request)
        with at_field("owners", InvalidValue):
            owners = pulse_users.find_owners(body["owners"])
        try:
            with at_field("username", InvalidUserName, pulse_users.NameTaken, pulse_users.CannotAdopt):
                pulse_user = pulse_users.adopt_pulse_user(body["username"], owners, request.user)
        except NotOnBroker as error:
            raise ValidationError({"username": ["There is no such account on the broker."]}) from error
        data = PulseUserSerializer(pulse_user, context=self.get_serializer_context()).data
        return Response(data, HTTPStatus.CREATED, headers={"Location": str(data["url"])})

    def _found(self, owner: Owner | None = None) -> Owner:
        """Return the owner that the path names, or this one as it is now, with the record about them."""
        pk = (owner or self.get_object()).pk
        return Owner.objects.prefetch_related("vouchings__by").get(pk=pk)


class Tokens(mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[AuthToken]):
    """The visitor's tokens."""

    serializer_class = TokenSerializer
    lookup_field = "uuid"
    filter_backends = []
    tells_secrets = ("create",)

    def get_queryset(self) -> QuerySet[AuthToken]:
        """Return the visitor's own, an operator's too."""
        return AuthToken.objects.filter(user=self.request.user.pk)

    def list(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """List your tokens, without their secrets."""
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: rest.Request, *args: Any, **kwargs: Any) -> Response:
        """Show a token, without its secret."""
        return super().retrieve(request, *args, **kwargs)

    @extend_schema(request=NewTokenSerializer, responses={201: MadeTokenSerializer})
    def create(self, request: Request) -> Response:
        """Make a token for this API.

        It is shown in this answer only.
        """
        vouching.require_vouched(request.user)
        body = read(NewTokenSerializer, request)
        row, token = tokens.create_token(request.user, body["name"], body["days"])
        return Response({**self.get_serializer(row).data, "token": token}, HTTPStatus.CREATED, headers=SHOWN_ONCE)

    def destroy(self, request: Request, uuid: str) -> Response:
        """Revoke a token."""
        tokens.revoke_token(self.get_object())
        return Response(status=HTTPStatus.NO_CONTENT)


class Me(GenericViewSet[Owner]):
    """Oneself."""

    serializer_class = MeSerializer
    pagination_class = None
    filter_backends = []

    def get_serializer_context(self) -> dict[str, Any]:
        """Return what the visitor may do, too."""
        return {**super().get_serializer_context(), "may_vouch": vouching.may_vouch(self.request.user)}

    @extend_schema(operation_id="me")
    def retrieve(self, request: Request) -> Response:
        """Show who you are, and whether somebody vouched for you."""
        return Response(self.get_serializer(request.user).data)

    @extend_schema(operation_id="vouching_ask", request=AskSerializer, responses={204: None, 409: None})
    def ask(self, request: Request) -> Response:
        """Ask to be vouched for, once a day at most."""
        body = read(AskSerializer, request)
        try:
            with at_field("reason", InvalidValue):
                vouching.request_vouching(request.user, body["reason"])
        except vouching.AlreadyRequested as error:
            raise Conflict(str(error)) from error
        return Response(status=HTTPStatus.NO_CONTENT)
