"""The admin: its lists and permissions, and what its actions do on the broker and report."""

import itertools
from functools import partial
from urllib.parse import urlsplit

import pytest
from allauth.socialaccount.models import SocialAccount
from django.apps import apps
from django.contrib import admin as administration
from django.test import Client, RequestFactory
from django.utils import timezone

from accounts import audit
from accounts.access import vouching
from accounts.access.tokens import create_token
from accounts.models import AuditEntry, AuthToken, Owner, PulseUser
from accounts.signing_in.links import create_link
from agents.models import Offering, SubscriptionQueue
from core.admin import AuditedAdmin
from core.models import Removal
from notifications import sending
from notifications.models import Notification
from tests.support.chromium import sign_in
from tests.support.rows import create_row
from tests.support.toolbox import (
    AWAY,
    call_before,
    in_parallel,
    messages_of,
    stored_queue,
)

SECRET = "s3cret-marker"
ODD = "queue/alice/<script>\u202e'\""
NOW = timezone.now()

# What the admin's forms may do to a row: add, change, delete. And the reason.
# fmt: off
ALLOWED = {
    "accounts.Owner": ("add change delete", "a person; who owns a Pulse user isn't deleted, nor is oneself"),
    "accounts.Vouching": ("", "a record; it goes with its owner"),
    "accounts.AuthToken": ("", "made by its owner, who sees it once; revoked by an action"),
    "accounts.PulseUser": ("", "its page changes it; thresholds of several are set, and several removed, by actions"),
    "accounts.NotificationAddress": ("delete", "somebody there has to confirm it first"),
    "accounts.Invitation": ("", "owners send it, and its invitee answers it; it goes with its owner"),
    "accounts.AuditEntry": ("", "a record"),
    "account.EmailAddress": ("", "a proven one lets somebody in; it goes with its owner"),
    "socialaccount.SocialAccount": ("", "it lets somebody in; it goes with its owner"),
    "queues.Queue": ("", "made on the broker; its page, and actions on several, delete it there and set its limits"),
    "queues.QueueEvent": ("", "a record"),
    "queues.Archive": ("", "its owners delete it; it has no messages here, since looking at them is recorded"),
    "queues.Replay": ("", "its owners start and stop it"),
    "queues.Move": ("", "its owners start and stop it"),
    "notifications.Notification": ("", "written with its cause; sent again by an action"),
    "notifications.Channel": ("delete", "its address is its owner's secret"),
    "queues.Pass": ("", "a record"),
    "agents.Sweep": ("", "a record"),
    "queues.Watch": ("", "the monitor's state: the brake, outages"),
    "core.Lease": ("", "taken and given back by processes"),
    "core.Removal": ("", "what is still to go from the broker"),
    "agents.AgentVhost": ("", "it goes with its owner, from the broker too"),
    "agents.Offering": ("add change delete", "what it had on the broker goes with it"),
    "agents.AgentIdentity": ("delete", "agents register; what it had on the broker goes with it"),
    "agents.AgentService": ("delete", "agents report it"),
    "agents.AgentProcessor": ("delete", "agents report it"),
    "agents.EventSubscription": ("delete", "agents register; what it had on the broker goes with it"),
    "agents.SubscriptionQueue": ("delete", "agents register; it goes from the broker too"),
    "agents.Consumer": ("delete", "agents register; it goes from the broker too"),
    "message_store.Application": ("add", "the store knows its queues by its name; removed by an action"),
    "message_store.ApplicationKey": ("", "shown once, when it is made; revoked by an action"),
}
# fmt: on
NOT_SHOWN = {
    "accounts.SignInLink": "it signs somebody in",
    "queues.QueueSample": "a queue's page has them as a chart",
    "queues.ArchiveChunk": "the messages of archives",
    "queues.MessageWatch": "it lasts five minutes, and is its owner's alone",
    **dict.fromkeys(
        (
            f"message_store.{model}"
            for model in ("QueueRow", "PrincipalRow", "PartitionRow", "MessageRow", "Discarded", "Position")
        ),
        "one store's own; the pages of the message store show what is in any",
    ),
    **dict.fromkeys(("message_store.Worker", "message_store.PartitionLease"), "written by workers all the time"),
}
WITHOUT_PAGES = {"accounts.AuthToken": "its address would have its digest in it"}
numbers, made = itertools.count(), []


def make_queue(**fields):
    defaults = {"name": f"queue/alice/{next(numbers)}", "ready": 3, "unacknowledged": 1, "first_seen": NOW}
    return stored_queue(**{**defaults, "last_seen": NOW, **fields})


def make_owner():
    return Owner.objects.create_user(f"owner-{next(numbers)}@example.org", vouched=True, last_login=NOW)


def make_pulse_user():
    pulse_user = PulseUser.objects.create(username=f"account-{next(numbers)}", ready=True)
    pulse_user.owners.set([make_owner(), make_owner()])
    make_queue(pulse_user=pulse_user)
    return pulse_user


def make_notification(**fields):
    fields = {"kind": "warning", "about": f"queue {next(numbers)}", "recipient": "alice@example.org", **fields}
    return Notification.objects.create(**{"facts": {}, "created": NOW, "due_at": NOW, "state": "failed", **fields})


def make_token():
    token, _ = create_token(make_owner(), "nightly")
    AuthToken.objects.filter(pk=token.pk).update(digest=f"{SECRET}{next(numbers)}")
    return AuthToken.objects.get(uuid=token.uuid)


def make_entry():
    audit.record(make_owner(), "purged", make_queue(), outcome_of="a test")
    return AuditEntry.objects.latest("pk")


def make_offering():
    offering = Offering.objects.create(name=f"Compute {next(numbers)}")
    offering.members.add(make_owner())
    return offering


SECRETS = {
    "agents.AgentIdentity": "sealed_config",
    "notifications.Channel": "sealed_url",
    "message_store.ApplicationKey": "digest",
}
"""The columns that no page may show."""


def make(label):
    """Create a row of this model, with all rows that it can refer to."""
    row = create_row(apps.get_model(label), "default", made, is_full=True)
    if column := SECRETS.get(label):
        setattr(row, column, f"{SECRET}{row.pk}")
        row.save()
    return row


MAKE = {label: partial(make, label) for label in ALLOWED} | {
    "accounts.Owner": make_owner,
    "accounts.AuthToken": make_token,
    "accounts.PulseUser": make_pulse_user,
    "accounts.AuditEntry": make_entry,
    "socialaccount.SocialAccount": lambda: SocialAccount.objects.create(
        user=make_owner(), provider="oidc", uid=str(next(numbers)), extra_data={"secret": SECRET}
    ),
    "notifications.Notification": lambda: make_notification(about=f"queue {make_queue().pk}"),
    "agents.Offering": make_offering,
}


def path_of(label):
    return f"/admin/{label.lower().replace('.', '/')}/"


def choose_action(client, model, action, *rows, **answers):
    chosen = [row.uuid if model is AuthToken else row.pk for row in rows]
    form = {"action": action, "_selected_action": chosen, **answers}
    return client.post(path_of(model._meta.label), form)


def confirm(client, page, **answers):
    fields = {"action": "", "_selected_action": "", "select_across": "", "chosen": "", "post": ""}
    for name in fields:
        [_, field] = page.text.split(f'name="{name}" value="')
        fields[name] = field.partition('"')[0]
    fields["confirm"] = confirmation_in(page)
    return client.post(page.request["PATH_INFO"], {**fields, **answers}, follow=False)


def confirmation_in(page):
    """Return the confirmation that queues are deleted, as the page would send it; empty: the page asks for none."""
    return page.text.partition('name="confirm" value="')[2].partition('"')[0]


# Every model


def test_every_model_is_in_the_admin_or_has_a_reason_not_to_be():
    registered = {model._meta.label for model in administration.site._registry}
    ours = {
        model._meta.label
        for app in ("accounts", "queues", "message_store")
        for model in administration.sites.apps.get_app_config(app).get_models()
    }
    assert ours <= registered | set(NOT_SHOWN)
    assert registered == set(ALLOWED)


@pytest.mark.parametrize("label", ALLOWED)
def test_forms_allow_only_changes_that_keep_database_and_broker_consistent(admin, operator, label):
    row, other = MAKE[label](), MAKE[label]()
    allowed, _ = ALLOWED[label]
    page = path_of(label)
    refused = 404 if label in WITHOUT_PAGES else 403
    assert admin.get(f"{page}add/").status_code == (200 if "add" in allowed else 403)
    assert admin.get(f"{page}{row.pk}/change/").status_code == (404 if label in WITHOUT_PAGES else 200)
    assert (admin.post(f"{page}{row.pk}/change/", {}).status_code == refused) is ("change" not in allowed)
    for address in (page, f"{page}{row.pk}/change/", f"{page}{row.pk}/delete/"):
        text = admin.get(address).text
        assert SECRET not in text
    for text in (row.uuid.hex, str(row.uuid)) if hasattr(row, "uuid") else ():
        assert [*admin.get(page, {"q": text}).context["cl"].result_list] == [row]
    deleted = admin.post(f"{page}{row.pk}/delete/", {"post": "yes"})
    assert deleted.status_code == (302 if "delete" in allowed else refused)
    assert type(row).objects.filter(pk=row.pk).exists() is ("delete" not in allowed)
    choose_action(admin, type(row), "delete_selected", other, post="yes")
    in_bulk = "delete" in allowed and label != "accounts.Owner"
    assert type(row).objects.filter(pk=other.pk).exists() is not in_bulk


@pytest.mark.parametrize(
    "parameter",
    ["name__regex", "pk__iregex", "ready__contained_by", "name__range", "first_seen__date__range"],
)
def test_expensive_and_invalid_lookups_in_urls_are_refused(admin, parameter):
    assert all(isinstance(one, AuditedAdmin) for one in administration.site._registry.values())
    assert admin.get("/admin/queues/queue/", {parameter: "(a+)+$"}).status_code == 400


ODD_LOOKUPS = {
    "CharField": ["exact=\0", "icontains=\0", "in=\0,a", "gt=\0"],
    "DateTimeField": ["year=99999999", "year=-1", "year__gte=10000", "gte=\0", "gte=99999-01-01", "month=10e99"],
    "IntegerField": ["exact=99999999999999999999999", "gte=-9e999", "in=\0", "lt=99999999999999999999999"],
    "TimeField": ["exact=\0", "hour=99999999", "gte=x"],
    "FloatField": ["exact=1e9999", "exact=nan", "gt=\0"],
    "JSONField": ["exact=\0", "a=\0", "contains=\0", "a__lt=\0", "has_key=\0"],
    "BooleanField": ["exact=\0", "isnull=\0"],
    "UUIDField": ["exact=\0", "exact=x", "gt=\0"],
    "BinaryField": ["exact=\0"],
    "ForeignKey": ["id__exact=\0", "id__exact=99999999999999999999999", "pk__in=\0", "isnull=\0"],
}
KINDS = {"TextField": "CharField", "EmailField": "CharField", "GenericIPAddressField": "CharField",
         "OneToOneField": "ForeignKey"}  # fmt: skip


def odd_filters(model_admin):
    """Yield parameters of a list's URL that the database can't compare with.

    They are for each field that the page offers as a filter, and one of each other kind.
    """
    offered = {one[0] if isinstance(one, tuple) else one for one in model_admin.list_filter}
    kinds = set()
    for field in model_admin.model._meta.concrete_fields:
        kind = field.get_internal_type()
        kind = "IntegerField" if "Integer" in kind or "AutoField" in kind else KINDS.get(kind, kind)
        if kind in kinds and field.name not in offered:
            continue
        kinds.add(kind)
        for lookup in ODD_LOOKUPS[kind]:
            name, _, value = lookup.partition("=")
            yield {f"{field.name}__{name}": value}
    for name in model_admin.list_filter:
        if isinstance(name, type):
            yield {name.parameter_name: "\0"}
    yield {"q": "\0"}
    yield {"p": "9" * 30}
    yield {"o": "\0"}
    if model_admin.date_hierarchy:
        for year in ("0", "9999", "10000", "9" * 30, "\0"):
            yield {f"{model_admin.date_hierarchy}__year": year}


@pytest.mark.slow
def test_no_value_in_the_url_of_a_list_is_a_server_error(transactional_db, admin):
    failed = []
    admin.raise_request_exception = False
    for model, model_admin in administration.site._registry.items():
        for parameters in odd_filters(model_admin):
            answer = admin.get(path_of(model._meta.label), parameters)
            if answer.status_code not in (200, 302, 400):
                failed.append((model._meta.label, parameters, answer.status_code))
    assert failed == []


def test_a_search_of_members_for_a_nul_character_finds_nobody(admin):
    where = {"app_label": "agents", "model_name": "offering", "field_name": "members", "term": "\0"}
    answer = admin.get("/admin/autocomplete/", where)
    assert (answer.status_code, answer.json()["results"]) == (200, [])


@pytest.fixture
def staff_only(db):
    """Return an operator without other rights, like one created on an owner's page."""
    return Owner.objects.create_user("helper@example.org", is_staff=True)


def test_operators_have_all_permissions_of_a_superuser(client, operator, staff_only):
    request = RequestFactory().get("/")
    seen = []
    for one in (operator, staff_only):
        request.user = one
        registered = administration.site._registry.items()
        seen.append(
            {model: (admin.get_model_perms(request), [*admin.get_actions(request)]) for model, admin in registered}
        )
    assert seen[0] == seen[1]
    assert all(rights["view"] for rights, _ in seen[1].values())
    client.force_login(staff_only)
    assert {label: client.get(path_of(label)).status_code for label in ALLOWED} == dict.fromkeys(ALLOWED, 200)


def test_an_operator_makes_another_owner_an_operator(client, staff_only):
    alice = make_owner()
    client.force_login(staff_only)
    form = {"email": alice.email, "is_staff": "on", "is_active": "on"}
    assert client.post(f"/admin/accounts/owner/{alice.pk}/change/", form).status_code == 302
    client.force_login(alice)
    assert client.get("/admin/queues/pass/").status_code == 200


@pytest.mark.parametrize("fields", [{"is_staff": True, "is_active": False}, {"is_superuser": True}, {"vouched": True}])
def test_owners_who_are_no_active_operators_are_refused(client, db, fields):
    one = Owner.objects.create_user("helper@example.org", **fields)
    assert not one.has_perm("queues.view_pass")
    assert not one.has_module_perms("queues")
    client.force_login(one)
    assert client.get("/admin/queues/pass/").status_code == 302


def test_operators_cannot_delete_themselves(admin, operator):
    assert admin.post(f"/admin/accounts/owner/{operator.pk}/delete/", {"post": "yes"}).status_code == 403
    assert Owner.objects.filter(pk=operator.pk).exists()


def test_a_form_keeps_fields_that_changed_meanwhile(admin, monkeypatch):
    owner = make_owner()
    call_before(monkeypatch, Owner, "save", lambda: Owner.objects.filter(pk=owner.pk).update(vouched=False))
    form = {"email": owner.email, "full_name": "Else", "is_active": "on"}
    assert admin.post(f"/admin/accounts/owner/{owner.pk}/change/", form).status_code == 302
    owner.refresh_from_db()
    assert (owner.full_name, owner.vouched) == ("Else", False)


# Actions


def test_the_list_of_queues_links_to_the_page_with_their_actions(admin):
    page = admin.get("/admin/queues/queue/", {"q": "a&b", "state__exact": "warned", "vhost": "/"})
    assert 'href="/queues/?search=a%26b&amp;state=warned&amp;vhost=/"' in page.text


def test_an_action_on_rows_deleted_meanwhile_says_so(admin):
    token = make_token()
    page = choose_action(admin, AuthToken, "revoke", token)
    token.delete()
    assert messages_of(confirm(admin, page)) == ["None of these exists any more."]


@pytest.mark.parametrize("odd", ["9" * 30, ",,", "-1", "x", "1.5", "\x00", "1\x00", "'"])
def test_invalid_keys_select_no_rows(admin, db, odd):
    pulse_user, token = make_pulse_user(), make_token()
    for model, action, row in ((PulseUser, "set_thresholds", pulse_user), (AuthToken, "revoke", token)):
        answers = {"post": "yes", "select_across": "1", "warn_length": "6", "max_length": "9"}
        assert choose_action(admin, model, action, row, chosen=odd, **answers).status_code == 302
        form = {"action": action, "_selected_action": [odd]}
        assert admin.post(path_of(model._meta.label), form).status_code == 302
    pulse_user.refresh_from_db()
    assert pulse_user.max_length is None
    assert AuthToken.objects.filter(pk=token.pk).exists()


@pytest.mark.parametrize("key", ["x", "9" * 30])
def test_the_history_of_an_unknown_audit_entry_is_404(admin, db, key):
    assert admin.get(f"/admin/accounts/auditentry/{key}/history/").status_code == 404


# Pulse users


def test_the_brake_limits_the_queues_of_removed_pulse_users(admin, settings):
    settings.GUARDIAN_DELETE_BRAKE = 2
    pulse_users = [make_pulse_user(), make_pulse_user()]
    make_queue(pulse_user=pulse_users[0])
    [text] = messages_of(choose_action(admin, PulseUser, "remove", *pulse_users, post="yes"))
    assert text.startswith("These are 3 queues, and at most 2 may be deleted at once")
    assert PulseUser.objects.filter(removing_since=None).count() == 2


def test_an_operator_sets_thresholds_of_pulse_users(admin):
    pulse_users = [make_pulse_user(), make_pulse_user()]
    page = choose_action(admin, PulseUser, "set_thresholds", *pulse_users)
    assert "below the deletion limit" in confirm(admin, page, warn_length="9", max_length="6").text
    assert messages_of(confirm(admin, page, warn_length="6", max_length="9"))[0].startswith("2 are updated")
    assert set(PulseUser.objects.values_list("warn_length", "max_length")) == {(6, 9)}


# Owners


def test_an_operator_withdraws_access_with_a_reason(admin, operator):
    owner = make_owner()
    create_token(owner, "kept")
    page = choose_action(admin, Owner, "withdraw", owner)
    assert owner.email in page.text
    answer = confirm(admin, page, **{"reason": "has left"})
    assert messages_of(answer)[0].startswith("1 is no longer able to create Pulse users and tokens")
    assert owner.vouchings.get().reason == "has left"
    assert AuthToken.objects.filter(user=owner).exists()


def test_belongings_are_removed_for_one_owner_at_a_time(admin, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    pulse_user = make_pulse_user()
    owners = list(pulse_user.owners.all())
    page = confirm(admin, choose_action(admin, Owner, "withdraw", *owners), remove="on")
    assert "removed for one owner at a time" in page.text
    assert all(Owner.objects.values_list("vouched", flat=True))
    for owner in owners:
        answer = confirm(admin, choose_action(admin, Owner, "withdraw", owner), remove="on")
        if owner == owners[-1]:
            answer = confirm(admin, answer, remove="on")  # it deletes a queue
        assert "Guardian removes the Pulse users that only they owned" in messages_of(answer)[0]
    pulse_user.refresh_from_db()
    assert (pulse_user.owners.count(), pulse_user.removing_since is not None) == (1, True)


def test_an_operator_is_skipped_when_access_is_withdrawn_in_bulk(admin, operator):
    owner = make_owner()
    answer = confirm(admin, choose_action(admin, Owner, "withdraw", operator, owner))
    assert sorted(text.partition(" ")[0] for text in messages_of(answer)) == ["'ops@example.org':", "1"]
    owner.refresh_from_db()
    assert not owner.vouched


def test_another_address_ends_sessions_links_and_the_providers_identity(admin):
    owner, client = make_owner(), Client()
    client.force_login(owner)
    link = create_link(owner)
    SocialAccount.objects.create(user=owner, provider="oidc", uid="1")
    form = {"email": "else@example.org", "is_active": "on"}
    assert admin.post(f"/admin/accounts/owner/{owner.pk}/change/", form).status_code == 302
    assert client.get("/queues/").status_code == 302
    assert client.post(urlsplit(link).path).status_code == 410
    assert not SocialAccount.objects.exists()


def test_operators_cannot_deactivate_themselves(admin, operator):
    form = {"email": operator.email, "full_name": "Ops"}
    assert admin.post(f"/admin/accounts/owner/{operator.pk}/change/", form).status_code == 302
    operator.refresh_from_db()
    assert (operator.full_name, operator.is_active, operator.is_staff) == ("Ops", True, True)


def test_an_owner_who_just_got_a_pulse_user_is_not_deleted(admin, monkeypatch):
    owner = make_owner()
    call_before(
        monkeypatch,
        vouching,
        "lock_existing",
        lambda: PulseUser.objects.create(username="late", ready=True).owners.add(owner),
    )
    assert admin.post(f"/admin/accounts/owner/{owner.pk}/delete/", {"post": "yes"}).status_code == 403
    assert Owner.objects.filter(pk=owner.pk).exists()


# Tokens


def test_an_operator_revokes_tokens_after_confirming(admin):
    tokens = [make_token(), make_token(), make_token()]
    page = choose_action(admin, AuthToken, "revoke", *tokens[1:])
    assert "2 tokens" in page.text
    assert tokens[1].user.email in page.text
    assert SECRET not in page.text
    assert AuthToken.objects.count() == 3
    assert messages_of(confirm(admin, page)) == ["2 are revoked: nightly, nightly."]
    assert AuthToken.objects.get() == tokens[0]


def test_only_the_rows_on_the_confirmation_page_are_revoked(admin):
    page = choose_action(admin, AuthToken, "revoke", make_token(), select_across="1")
    newer = make_token()
    assert messages_of(confirm(admin, page)) == ["1 is revoked: nightly."]
    assert AuthToken.objects.get() == newer


def test_the_page_that_deletes_an_owner_shows_no_digest(admin):
    token = make_token()
    page = admin.get(f"/admin/accounts/owner/{token.user_id}/delete/")
    assert "nightly" in page.text
    assert SECRET not in page.text


# Agents


def test_the_brake_limits_the_agents_queues_of_an_action(admin, settings):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    settings.GUARDIAN_DELETE_BRAKE = 2
    rows = [make("agents.SubscriptionQueue") for _ in range(3)]
    for label, picked in (
        ("agents.SubscriptionQueue", rows),
        ("agents.EventSubscription", [row.subscription for row in rows]),
        ("agents.AgentIdentity", [row.subscription.identity for row in rows]),
        ("agents.Offering", [row.offering for row in rows]),
    ):
        form = {"action": "delete_selected", "_selected_action": [row.pk for row in picked], "post": "yes"}
        [text] = messages_of(admin.post(path_of(label), form))
        assert text.startswith("These are 3 queues, and at most 2 may be deleted at once")
    assert SubscriptionQueue.objects.count() == 3
    answer = choose_action(admin, SubscriptionQueue, "delete_selected", *rows[:2], post="yes")
    assert "'Removals' lists what is still pending" in messages_of(answer)[0]
    assert set(Removal.objects.filter(kind="queue").values_list("name", flat=True)) == {
        row.queue_name for row in rows[:2]
    }


# The outbox


def test_an_operator_sends_a_failed_notification_again(admin, mailbox, settings):
    settings.GUARDIAN_OPERATOR_EMAILS = ["alice@example.org"]
    given_up = make_notification(
        kind="outage", about="the broker", facts={"error": "no answer"}, attempts=100, last_error="refused"
    )
    assert messages_of(choose_action(admin, Notification, "send_again", given_up)) == [
        "1 notification will be sent again within half a minute."
    ]
    assert sending.send_due().sent == 1
    given_up.refresh_from_db()
    assert (given_up.state, given_up.attempts, given_up.last_error) == ("sent", 0, "")
    assert len(mailbox.mails) == 1
    assert "1 will not be sent again" in messages_of(choose_action(admin, Notification, "send_again", given_up))[0]
    assert sending.send_due().claimed == 0


def test_two_operators_who_send_a_notification_again_send_it_once(transactional_db):
    given_up = make_notification()
    assert sorted(in_parallel(*[lambda: sending.send_again([given_up.pk])] * 2)) == [0, 1]
    assert AuditEntry.objects.filter(event="sent again").count() == 1


@pytest.mark.parametrize(
    ("later", "together", "again"),
    [("sent", False, 0), ("failed", False, 0), ("failed", True, 2), ("due", False, 1), (None, False, 1)],
)
def test_an_outdated_notification_is_not_sent_again(db, later, together, again):
    first = make_notification(about="queue 1")
    picked = [first.pk]
    if later:
        second = make_notification(about="queue 1", kind="recovery", state=later)
        picked += [second.pk] if together else []
    assert sending.send_again(picked) == again
    first.refresh_from_db()
    assert first.state == ("due" if again else "failed")


def test_a_failed_notification_is_sent_again_after_an_earlier_one_was_sent(db):
    make_notification(about="queue 1", state="sent")
    assert sending.send_again([make_notification(about="queue 1", kind="recovery").pk]) == 1


def test_a_weekly_report_is_sent_again_after_a_later_one(db):
    first = make_notification(kind="weekly", about="weekly")
    make_notification(kind="weekly", about="weekly", state="sent")
    assert sending.send_again([first.pk]) == 1


# Access to actions


def test_only_operators_are_offered_actions(db):
    request = RequestFactory().get("/")
    request.user = make_owner()
    for model_admin in administration.site._registry.values():
        assert list(model_admin.get_actions(request)) == [], model_admin


def test_an_action_needs_the_csrf_token(operator):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(operator)
    assert choose_action(strict, AuthToken, "revoke", make_token(), post="yes").status_code == 403
    assert AuthToken.objects.exists()


def test_actions_work_by_keyboard_in_a_browser_without_csp_violations(page, settings, mailbox):
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    operator = Owner.objects.create_superuser("ops@example.org")
    for number in range(3):
        PulseUser.objects.create(username=f"{'long-' * 19}{number}", ready=True)
    sign_in(page, operator)
    for width in (360, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("/admin/accounts/pulseuser/")
        page.check("#action-toggle")
        page.select_option("select[name=action]", "set_thresholds")
        page.click("button[name=index]")
        # Wait for the form: between the click and the next page there is no document to measure.
        page.get_by_label("Warning threshold (messages)").fill(str(width))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_label("Deletion limit (messages)").fill("4000")
        page.keyboard.press("Enter")
        page.get_by_text("3 are updated").wait_for()
    assert set(PulseUser.objects.values_list("warn_length", "max_length")) == {(1600, 4000)}
    page.goto("/admin/accounts/auditentry/")
    page.get_by_text("warning threshold: 360 → 1600").first.wait_for()
    assert page.get_by_text("ops@example.org", exact=True).count() >= 6


def test_the_list_of_owners_shows_how_many_pulse_users_each_has(admin, pulse_user):
    assert 'class="field-owned">1</td>' in admin.get("/admin/accounts/owner/?o=-6").text
