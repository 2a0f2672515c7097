"""Vouching: who may use the broker, and the record of who or which rule decided it."""

from collections.abc import Collection, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from http import HTTPStatus

from allauth.account.models import EmailAddress
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from accounts import audit, signals
from accounts.models import Owner, Vouching, normalize_address, owner_with_address
from core.refusals import Refusal
from core.texts import check_line

MIN_REQUEST_INTERVAL = timedelta(days=1)

# As in the models.
MAX_REASON_LENGTH = 300
MAX_REQUEST_LENGTH = 500

# Prefixes of the reasons in records made by rules.
BY_DOMAIN = "By rule: an address at "
BY_GROUP = "By rule: a member of the group "
NO_LONGER_IN_GROUP = "By rule: no longer a member of a group with access"
RULE = "By rule: "


class NotVouched(Refusal, PermissionDenied):
    """The owner may not use the broker. A page that doesn't expect it answers 403, too."""

    status = HTTPStatus.FORBIDDEN


def may_vouch(visitor: Owner | AnonymousUser) -> bool:
    """Return whether this visitor may vouch for others: operators, and vouched owners if the settings allow it."""
    if not visitor.is_authenticated:
        return False
    return visitor.is_staff or (visitor.vouched and settings.GUARDIAN_OWNERS_MAY_VOUCH)


def require_may_vouch(visitor: Owner | AnonymousUser) -> None:
    if not may_vouch(visitor):
        raise PermissionDenied("You can't approve access. Ask an operator.")


def acts_as_operator(by: Owner | None) -> bool:
    """Return whether this owner may do what operators may. None is a command, which only operators can run."""
    return by is None or by.is_staff


def require_vouched(owner: Owner) -> None:
    """Raise NotVouched unless this owner may use the broker. Operators may even if nobody vouched for them."""
    if not owner.is_active:
        raise NotVouched(f"{owner.email} is deactivated. Ask an operator.")
    if not owner.vouched and not owner.is_staff:
        raise NotVouched(
            f"{owner.email} has no access to the broker yet, so nothing can be created there. "
            "Request access on the page Access."
        )


def may_use_broker(owner: Owner) -> bool:
    try:
        require_vouched(owner)
    except NotVouched:
        return False
    return True


def vouch(owner: Owner, by: Owner | None, reason: str = "") -> None:
    """Let an owner use the broker, and record who vouched. ``by`` is None for a rule or command, named in the reason.

    A person can also vouch for an owner who is vouched for by a rule. Then the rule no longer withdraws it. After a
    withdrawal by an operator, only operators can vouch again. PermissionDenied is raised if ``by`` may not vouch, and
    ValidationError also if the reason begins like a rule's.
    """
    if by is not None:
        require_may_vouch(by)
    reason = _normalized_reason(reason, by)
    with transaction.atomic():
        locked = lock(owner)
        last = locked.vouchings.first()
        if by is not None and not by.is_staff and _is_withdrawn_by_a_person(last):
            raise PermissionDenied(f"An operator withdrew the access of {locked.email}. Ask an operator.")
        is_new = not locked.vouched
        if is_new or (by is not None and not _is_by_a_person(last)):
            locked.vouched, locked.vouch_requested_at, locked.vouch_request = True, None, ""
            locked.save(update_fields=["vouched", "vouch_requested_at", "vouch_request"])
            Vouching.objects.create(owner=locked, vouched=True, by=by, reason=reason)
            if not is_new:  # otherwise the change of the row is audited
                audit.record(by, "approved access, too", locked, reason=reason)
        if is_new:
            signals.vouched.send(Owner, owner=locked, by=by)
    _refresh(locked, owner)


def vouch_for_address(email: str, by: Owner, reason: str = "") -> None:
    """Let the owner who has signed in with this address use the broker, as :func:`vouch` does.

    Only operators learn if there is none (Refusal), or if an operator withdrew the access (PermissionDenied).
    """
    require_may_vouch(by)
    _normalized_reason(reason, by)  # raises its error whether there is such an owner or not
    owner = find_owner(email)
    if owner is None and by.is_staff:
        where = settings.GUARDIAN_BASE_URL
        raise Refusal(
            f"Nobody has signed in with this address yet. Ask the person to sign in first, at {where}.", "email"
        )
    if owner is not None:
        with nullcontext() if by.is_staff else suppress(PermissionDenied):
            vouch(owner, by, reason)


def unvouch(owner: Owner, by: Owner | None, reason: str = "") -> None:
    """Keep an owner from creating Pulse users and tokens, and record who did. ``by`` is None for a rule.

    A person declines an open request with it.

    Existing Pulse users and tokens keep working; ``withdrawal.withdraw`` can remove them. Raises PermissionDenied if
    ``by`` is no operator or the owner is one, and ValidationError also if the reason begins like a rule's.
    """
    if by is not None and not by.is_staff:
        raise PermissionDenied("Only operators can withdraw access.")
    reason = _normalized_reason(reason, by)
    with transaction.atomic():
        locked = lock(owner)
        if locked.is_staff:
            raise PermissionDenied(f"{locked.email} is an operator. First remove that status in the admin.")
        last = locked.vouchings.first()
        is_new = by is not None and (bool(locked.vouch_request) or not _is_withdrawn_by_a_person(last))
        if (was := locked.vouched) or is_new:
            locked.vouched, locked.vouch_request = False, ""  # the time stays: a request a day
            locked.save(update_fields=["vouched", "vouch_request"])
            Vouching.objects.create(owner=locked, vouched=False, by=by, reason=reason)
            if not was:
                audit.record(by, "refused access", locked, reason=reason)
    _refresh(locked, owner)


def request_vouching(owner: Owner, reason: str) -> None:
    """Record an owner's request to be vouched for, at most once a day. Raises Refusal."""
    reason = " ".join(reason.split())
    check_line(reason, MAX_REQUEST_LENGTH)
    with transaction.atomic():
        locked = lock(owner)
        if locked.vouched or locked.is_staff:
            raise Refusal("You have access already.", status=HTTPStatus.CONFLICT)
        asked, now = locked.vouch_requested_at, timezone.now()
        if asked is not None and asked <= now < asked + MIN_REQUEST_INTERVAL:
            raise Refusal(
                "You requested access within the last day. The operators have your message. Request again tomorrow.",
                status=HTTPStatus.CONFLICT,
            )
        locked.vouch_requested_at, locked.vouch_request = now, reason
        locked.save(update_fields=["vouch_requested_at", "vouch_request"])
        audit.record(locked, "requested access", locked, reason=reason)
        signals.vouch_requested.send(Owner, owner=locked, reason=reason)
    _refresh(locked, owner)


def open_requests() -> QuerySet[Owner]:
    """Return the owners whose request for access has no answer, the earliest first."""
    asking = Owner.objects.filter(vouch_requested_at__isnull=False, vouched=False, is_active=True)
    return asking.exclude(vouch_request="").order_by("vouch_requested_at")


def apply_rules(owner: Owner, *, address: str | None, groups: Collection[str] | None) -> None:
    """Apply the vouching rules to an owner who signs in.

    Vouch for the owner if a rule matches. Withdraw a vouching by group if the owner is in no vouched group any more.
    ``address`` is the address that this sign-in verified, or None. ``groups`` are those from the OpenID Connect
    provider, or None if it was not asked. A withdrawal by a person stays valid. Only changes are recorded.
    """
    with transaction.atomic():
        locked = lock(owner)
        last = locked.vouchings.first()
        reason = _reason_by_rule(address, groups)
        if reason is not None:
            if not locked.vouched and not _is_withdrawn_by_a_person(last):
                vouch(locked, None, reason)
        elif groups is not None and locked.vouched and not locked.is_staff and _is_by_group(last):
            unvouch(locked, None, reason=NO_LONGER_IN_GROUP)
    _refresh(locked, owner)


def lock(owner: Owner) -> Owner:
    """Return the owner from the database, locked until the transaction ends."""
    # no_key prevents a deadlock: a full lock would block a transaction that adds this owner to a Pulse user. That
    # transaction has locked the Pulse user, and a withdrawal waits for the Pulse user.
    return Owner.objects.select_for_update(no_key=True).get(pk=owner.pk)


def lock_all(owners: Iterable[Owner]) -> list[Owner]:
    """Return these owners locked as by :func:`lock`, without duplicates, in one query.

    Raises NotVouched if an owner no longer exists.
    """
    wanted = {owner.pk: owner for owner in owners}
    locked = lock_existing(wanted.values())
    for pk in wanted.keys() - {owner.pk for owner in locked}:
        raise NotVouched(f"{wanted[pk].email} no longer exists.")
    return locked


def lock_existing(owners: Iterable[Owner]) -> list[Owner]:
    """Return those of these owners that still exist, locked as by :func:`lock`, in one query."""
    these = Owner.objects.filter(pk__in=[owner.pk for owner in owners])
    return list(these.select_for_update(no_key=True).order_by("pk"))


def possible_owners() -> QuerySet[Owner]:
    """Return the owners who can own a Pulse user: they may use the broker and have signed in."""
    return Owner.objects.filter(Q(vouched=True) | Q(is_staff=True), has_signed_in(), is_active=True)


def has_signed_in() -> Q:
    """Return the condition that an owner has signed in or verified the address, or is an operator."""
    verified = EmailAddress.objects.filter(user=OuterRef("pk"), email=OuterRef("email"), verified=True)
    return Q(Exists(verified)) | Q(last_login__isnull=False) | Q(is_staff=True)


def listed_owners() -> QuerySet[Owner]:
    """Return the owners to list for operators. Owners who only requested a sign-in code are left out."""
    return Owner.objects.filter(has_signed_in() | Q(vouched=True))


def find_owner(email: str) -> Owner | None:
    """Return the owner who has signed in with this address, or None."""
    return owner_with_address(email, Owner.objects.filter(has_signed_in()))


def _reason_by_rule(address: str | None, groups: Collection[str] | None) -> str | None:
    """Return the reason for vouching by a rule that matches the address or the groups, or None."""
    domain = normalize_address(address or "").rpartition("@")[2]
    if domain and domain in settings.GUARDIAN_VOUCHED_DOMAINS:
        return (BY_DOMAIN + domain)[:MAX_REASON_LENGTH]
    named = [groups] if isinstance(groups, str) else groups or ()
    for group in settings.OIDC_VOUCHED_GROUPS:
        if group in named:
            return (BY_GROUP + group)[:MAX_REASON_LENGTH]
    return None


def _is_by_a_person(record: Vouching | None) -> bool:
    # ``by`` is also None after the person was deleted. The reason identifies a rule.
    return record is not None and (record.by_id is not None or not record.reason.startswith(RULE))


def _is_withdrawn_by_a_person(record: Vouching | None) -> bool:
    return record is not None and not record.vouched and _is_by_a_person(record)


def _is_by_group(record: Vouching | None) -> bool:
    return record is not None and record.by_id is None and record.reason.startswith(BY_GROUP)


def _normalized_reason(reason: str, by: Owner | None) -> str:
    """Return the reason as one line, which may be empty. A person's reason must not begin like a rule's."""
    line = " ".join(reason.split())
    if by is not None and line.casefold().startswith(RULE.strip().casefold()):
        raise ValidationError(
            f"A reason can't begin with '{RULE.strip()}', because records of rules do. Choose other words."
        )
    if line:
        check_line(line, MAX_REASON_LENGTH)
    return line


def _refresh(locked: Owner, owner: Owner) -> None:
    """Copy the current values to the caller's instance."""
    for field in ("vouched", "vouch_requested_at", "vouch_request"):
        setattr(owner, field, getattr(locked, field))
