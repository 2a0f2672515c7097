"""Who may use the broker: by whom, by which rule, and since when."""

from collections.abc import Collection, Iterable
from datetime import timedelta

from allauth.account.models import EmailAddress
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from accounts import audit, signals
from accounts.models import Owner, Vouching, check_line, normalize_address

MIN_REQUEST_INTERVAL = timedelta(days=1)

# In characters, as in the models.
MAX_REASON_LENGTH = 300
MAX_REQUEST_LENGTH = 500

# What the reasons of the rules' own records begin with.
BY_DOMAIN = "By rule: an address under "
BY_GROUP = "By rule: a member of the group "
NO_LONGER_IN_GROUP = "By rule: no longer a member of a group that is vouched for"
RULE = "By rule: "


class NotVouched(PermissionDenied):
    """This owner may not use the broker. The text says why, and what to do."""


class AlreadyRequested(ValueError):
    """There is nothing to ask for, or it was asked a short while ago. The text says which."""


def may_vouch(visitor: Owner | AnonymousUser) -> bool:
    """Return whether this visitor may vouch for others: an operator, and where the settings allow it whoever is."""
    if not visitor.is_authenticated:
        return False
    return visitor.is_staff or (visitor.vouched and settings.GUARDIAN_OWNERS_MAY_VOUCH)


def require_vouched(owner: Owner) -> None:
    """Make sure that this owner may use the broker. Operators may, vouched for or not.

    Raises:
        NotVouched: they may not.
    """
    if not owner.is_active:
        raise NotVouched(f"{owner.email} can't sign in any more. Ask an operator.")
    if not owner.vouched and not owner.is_staff:
        raise NotVouched(
            f"Nobody has vouched for {owner.email} yet, so nothing can be made on the broker. "
            "Ask for it on the page Vouching."
        )


def may_use_broker(owner: Owner) -> bool:
    """Return whether this owner may use the broker, so that a page shows no form in vain."""
    try:
        require_vouched(owner)
    except NotVouched:
        return False
    return True


def vouch(owner: Owner, by: Owner | None, reason: str = "") -> None:
    """Let an owner use the broker, and record who said so; ``by`` None: a rule, or a command, which the reason names.

    Who is vouched for by a rule can be vouched for by a person on top; then the rule doesn't take it away any more.
    What an operator withdrew, no other owner gives back.

    Raises:
        PermissionDenied: ``by`` may not vouch for others, or not for this one.
        ValidationError: the reason is too long, has control characters in it, or looks like a rule's.
    """
    if by is not None and not may_vouch(by):
        raise PermissionDenied("You can't vouch for others. Ask an operator.")
    reason = _normalized_reason(reason, by)
    with transaction.atomic():
        locked = lock(owner)
        last = locked.vouchings.first()
        if by is not None and not by.is_staff and _is_withdrawn_by_a_person(last):
            raise PermissionDenied(f"An operator withdrew it from {locked.email}. Ask an operator.")
        is_new = not locked.vouched
        if is_new or (by is not None and not _is_by_a_person(last)):
            locked.vouched, locked.vouch_requested_at, locked.vouch_request = True, None, ""
            locked.save(update_fields=["vouched", "vouch_requested_at", "vouch_request"])
            Vouching.objects.create(owner=locked, vouched=True, by=by, reason=reason)
            if not is_new:  # else the row's own change is in the trail
                audit.note(by, "vouched for, too", locked, reason=reason)
        if is_new:
            signals.vouched.send(Owner, owner=locked, by=by)
    _refresh(locked, owner)


def unvouch(owner: Owner, by: Owner | None, reason: str = "") -> None:
    """Stop an owner from making new accounts and tokens, and record who said so; ``by`` None: a rule.

    What they have goes on; ``withdrawal.withdraw`` removes that too.

    Raises:
        PermissionDenied: ``by`` is no operator, or the owner is one.
        ValidationError: the reason is too long, has control characters in it, or looks like a rule's.
    """
    if by is not None and not by.is_staff:
        raise PermissionDenied("Only operators can withdraw what somebody vouched for.")
    reason = _normalized_reason(reason, by)
    with transaction.atomic():
        locked = lock(owner)
        if locked.is_staff:
            raise PermissionDenied(f"{locked.email} is an operator. Take that away first, in the admin.")
        last = locked.vouchings.first()
        if (was := locked.vouched) or (by is not None and not _is_withdrawn_by_a_person(last)):
            locked.vouched = False
            locked.save(update_fields=["vouched"])
            Vouching.objects.create(owner=locked, vouched=False, by=by, reason=reason)
            if not was:
                audit.note(by, "ruled out that anybody else vouches for", locked, reason=reason)
    _refresh(locked, owner)


def request_vouching(owner: Owner, reason: str) -> None:
    """Ask to be vouched for. Once a day is enough.

    Raises:
        AlreadyRequested: it was asked within a day, or somebody has vouched already.
        ValidationError: there is no reason, or it is too long, or has control characters in it.
    """
    reason = " ".join(reason.split())
    check_line(reason, MAX_REQUEST_LENGTH)
    with transaction.atomic():
        locked = lock(owner)
        if locked.vouched or locked.is_staff:
            raise AlreadyRequested("You are vouched for already.")
        asked, now = locked.vouch_requested_at, timezone.now()
        if asked is not None and asked <= now < asked + MIN_REQUEST_INTERVAL:
            raise AlreadyRequested("You have asked within a day. The operators have your message; ask again tomorrow.")
        locked.vouch_requested_at, locked.vouch_request = now, reason
        locked.save(update_fields=["vouch_requested_at", "vouch_request"])
        audit.note(locked, "asked to be vouched for", locked, reason=reason)
        signals.vouch_requested.send(Owner, owner=locked, reason=reason)
    _refresh(locked, owner)


def apply_rules(owner: Owner, *, address: str | None, groups: Collection[str] | None) -> None:
    """Vouch for an owner who signs in, where a rule says so, and take back what the rule of the groups gave.

    ``address`` is the one that this sign-in proved, None: it proved none. ``groups`` are those that the OpenID Connect
    provider lists, None: it was not asked. What a person withdrew stays withdrawn, and where nothing changes nothing is
    recorded.
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
    """Return this owner as the database has it, and keep others from vouching and withdrawing until the commit."""
    # Not against a key: who adds this owner to an account meanwhile holds the account, which withdrawing waits for.
    return Owner.objects.select_for_update(no_key=True).get(pk=owner.pk)


def lock_all(owners: Iterable[Owner]) -> list[Owner]:
    """Return these owners as :func:`lock` does, each once, in one query.

    Raises:
        NotVouched: one was removed meanwhile.
    """
    wanted = {owner.pk: owner for owner in owners}
    locked = lock_existing(wanted.values())
    for pk in wanted.keys() - {owner.pk for owner in locked}:
        raise NotVouched(f"{wanted[pk].email} was removed meanwhile, and may not use the broker.")
    return locked


def lock_existing(owners: Iterable[Owner]) -> list[Owner]:
    """Return those of these owners that are there, as :func:`lock` does, in one query."""
    these = Owner.objects.filter(pk__in=[owner.pk for owner in owners])
    return list(these.select_for_update(no_key=True).order_by("pk"))


def possible_owners() -> QuerySet[Owner]:
    """Return those who may use the broker and have signed in: they can own an account."""
    return Owner.objects.filter(Q(vouched=True) | Q(is_staff=True), has_signed_in(), is_active=True)


def has_signed_in() -> Q:
    """Return the condition that somebody has proven the address, or is an operator: who merely typed it has not."""
    proven = EmailAddress.objects.filter(user=OuterRef("pk"), email=OuterRef("email"), verified=True)
    return Q(Exists(proven)) | Q(last_login__isnull=False) | Q(is_staff=True)


def listed_owners() -> QuerySet[Owner]:
    """Return the owners that operators see: not who merely typed an address."""
    return Owner.objects.filter(has_signed_in() | Q(vouched=True))


def find_owner(email: str) -> Owner | None:
    """Return the owner with this address who can be vouched for by it; None: nobody has signed in with it."""
    return Owner.objects.filter(has_signed_in(), email=normalize_address(email)).first()


def _reason_by_rule(address: str | None, groups: Collection[str] | None) -> str | None:
    """Return the reason why a rule vouches for who has this address and is in these groups; None: none does."""
    domain = (address or "").rpartition("@")[2].lower()
    if domain and domain in settings.GUARDIAN_VOUCHED_DOMAINS:
        return (BY_DOMAIN + domain)[:MAX_REASON_LENGTH]
    named = [groups] if isinstance(groups, str) else groups or ()
    for group in settings.OIDC_VOUCHED_GROUPS:
        if group in named:
            return (BY_GROUP + group)[:MAX_REASON_LENGTH]
    return None


def _is_by_a_person(record: Vouching | None) -> bool:
    # The person may be gone meanwhile; a rule's records say so.
    return record is not None and (record.by_id is not None or not record.reason.startswith(RULE))


def _is_withdrawn_by_a_person(record: Vouching | None) -> bool:
    return record is not None and not record.vouched and _is_by_a_person(record)


def _is_by_group(record: Vouching | None) -> bool:
    return record is not None and record.by_id is None and record.reason.startswith(BY_GROUP)


def _normalized_reason(reason: str, by: Owner | None) -> str:
    """Return a reason as one line, which may be empty. A person's doesn't look like a rule's."""
    line = " ".join(reason.split())
    if by is not None and line.casefold().startswith(RULE.strip().casefold()):
        raise ValidationError(
            f"A reason can't begin with '{RULE.strip()}': so do the records of rules. Word it otherwise."
        )
    if line:
        check_line(line, MAX_REASON_LENGTH)
    return line


def _refresh(locked: Owner, owner: Owner) -> None:
    """Have the caller's copy say what the database says now."""
    for field in ("vouched", "vouch_requested_at", "vouch_request"):
        setattr(owner, field, getattr(locked, field))
