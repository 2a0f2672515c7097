"""Changes by people that delete queues: what they delete is shown first, and confirmed."""

import html
import re
from datetime import timedelta
from functools import partial

import pytest
import time_machine
from django.db import transaction
from django.utils import timezone

from accounts.access.tokens import create_token
from accounts.models import AuditEntry, AuthToken, Owner, PulseUser
from accounts.queue_effects import removal_of
from agents.models import Offering
from core.confirmation import MAX_EXAMPLES, AffectedQueue, ConfirmableChange, ConfirmationRequired, Effect
from core.endpoints import ConfirmSerializer
from queues.actions import effects, single
from queues.guard.once import run_once
from queues.models import Queue, QueueEvent
from tests.agents.test_subscription_pages import compute, make_agent, make_subscription, store_queue_row  # noqa: F401
from tests.site.test_admin import choose_action, confirm, confirmation_in
from tests.support.api import Program, Visitor
from tests.support.toolbox import in_background, in_parallel, messages_of, queue_names, stored_queue, wait_until_blocked

LONG = 420
"""Below the usual deletion limit of 8,000 messages."""


def store(name="queue/alice/builds", ready=LONG, **fields):
    """Store a queue as a pass does."""
    return stored_queue(name, **{"ready": ready, "unacknowledged": 0, **fields})


@pytest.fixture
def queue(pulse_user):
    return store(pulse_user=pulse_user)


def names_in(effect):
    return sorted(queue.name for queue in effect.queues)


def limits_of(queue):
    queue.refresh_from_db()
    return queue.unbounded, queue.warn_length, queue.max_length


def test_a_lowered_limit_deletes_a_queue_above_it_but_not_one_at_it(operator, queue):
    single.set_limits(queue, operator, warn_length=1, max_length=LONG)
    with pytest.raises(ConfirmationRequired) as asked:
        single.set_limits(queue, operator, max_length=LONG - 1)
    assert str(asked.value) == "This deletes 1 queue with 420 messages."
    assert limits_of(queue) == (False, 1, LONG)


@pytest.mark.parametrize(
    "fields",
    [
        {"unbounded": True},
        {"exclusive": True},
        {"registered": True},
        {"ready": None, "type": "stream"},
        {"state": "gone"},
        {"max_length": 300},
    ],
    ids=["unbounded", "exclusive", "registered", "a stream", "gone", "over its limit already"],
)
def test_a_lowered_limit_does_not_delete_a_queue_that_is(operator, pulse_user, fields):
    queue = store(pulse_user=pulse_user, **{"warn_length": 10, **fields})
    single.set_limits(queue, operator, max_length=20)
    assert limits_of(queue)[2] == 20


def test_a_queue_of_unknown_length_may_be_deleted_by_a_lower_limit(operator, pulse_user):
    queue = store(pulse_user=pulse_user, unacknowledged=None, warn_length=10, max_length=100)
    single.set_limits(queue, operator, max_length=200)
    with pytest.raises(ConfirmationRequired, match="an unknown number in 1 queue"):
        single.set_limits(queue, operator, max_length=20)
    single.set_limits(queue, operator, unbounded=True)
    with pytest.raises(ConfirmationRequired):
        single.set_limits(queue, operator, unbounded=False)
    assert limits_of(queue) == (True, 10, 200)


def test_a_limit_that_is_removed_is_replaced_by_the_pulse_users_or_the_policys(operator, pulse_user):
    PulseUser.objects.update(warn_length=10, max_length=20)
    pulse_user.refresh_from_db()
    queue = store(pulse_user=pulse_user, warn_length=10, max_length=1000)
    unowned = store("loose", 9000, warn_length=10, max_length=10_000)
    for one in (queue, unowned):
        with pytest.raises(ConfirmationRequired):
            single.set_limits(one, operator, max_length=None)


def test_a_long_queue_that_is_no_longer_unbounded_is_deleted(operator, pulse_user):
    queue = store(pulse_user=pulse_user, ready=9000, unbounded=True)
    with pytest.raises(ConfirmationRequired):
        single.set_limits(queue, operator, unbounded=False)
    single.set_limits(queue, operator, unbounded=False, max_length=10_000)


def test_a_queue_that_is_no_longer_unbounded_may_be_deleted_for_its_name(operator, db, settings):
    settings.GUARDIAN_NAMESPACE_POLICY = "delete-unpatterned"
    with pytest.raises(ConfirmationRequired, match="1 queue with 0 messages"):
        single.set_limits(store("loose", 0, unbounded=True), operator, unbounded=False)
    single.set_limits(store("queue/bob/builds", 0, unbounded=True), operator, unbounded=False)


def test_thresholds_of_a_pulse_user_delete_its_queues_without_limits_of_their_own(operator, pulse_user, queue):
    store("queue/alice/own", max_length=1000, pulse_user=pulse_user)
    store("queue/alice/short", 5, pulse_user=pulse_user)
    store("queue/bob/other")
    answer = Program(operator).patch("pulse-users/alice/", {"warn_length": 10, "max_length": 20})
    assert answer.json()["effect"]["examples"] == [{"name": queue.name, "vhost": "/", "messages": LONG}]


def test_queues_of_a_pulse_user_adopted_since_the_last_pass_are_affected(operator, pulse_user):
    store("queue/alice/builds")
    assert names_in(effects.of_removal([pulse_user])) == ["queue/alice/builds"]
    answer = Program(operator).patch("pulse-users/alice/", {"warn_length": 10, "max_length": 20})
    assert (answer.status_code, answer.json()["effect"]["queues"]) == (409, 1)


def test_a_pulse_user_is_removed_with_all_its_queues_once(pulse_user, queue):
    store("queue/alice/unknown", pulse_user=pulse_user, unacknowledged=None, unbounded=True)
    store("queue/alice/gone", pulse_user=pulse_user, state="gone")
    effect = effects.of_removal([pulse_user])
    assert names_in(effect) == ["queue/alice/builds", "queue/alice/unknown"]
    assert effect.sentence == "This deletes 2 queues with 420 messages, and an unknown number in 1 queue."
    pulse_user.removing_since = timezone.now()
    assert names_in(effects.of_removal([pulse_user])) == []


def test_the_longest_queues_are_the_examples(operator, pulse_user):
    for number in range(MAX_EXAMPLES + 5):
        store(f"queue/alice/{number}", 100 + number, pulse_user=pulse_user)
    effect = Program(operator).patch("pulse-users/alice/", {"warn_length": 10, "max_length": 20}).json()["effect"]
    assert effect["queues"] == MAX_EXAMPLES + 5
    assert effect["messages"] == sum(range(100, 100 + MAX_EXAMPLES + 5))
    assert [one["messages"] for one in effect["examples"]] == list(range(124, 104, -1))


def asked_by(program, path, body):
    """Return the confirmation that a change needs."""
    answer = program.patch(path, body)
    assert answer.status_code == 409, answer.text
    return answer.json()["confirm"]


@pytest.fixture
def change(operator, queue):
    """Return a function that sends the change of a limit, with a confirmation or without one."""
    program = Program(operator)

    def send(confirmation=""):
        return program.patch(f"queues/{queue.uuid}/", {"max_length": 400, "warn_length": 10, "confirm": confirmation})

    return send


def test_an_unconfirmed_change_is_answered_with_its_effect_and_changes_nothing(change, queue):
    answer = change()
    assert (answer.status_code, answer["Content-Type"]) == (409, "application/problem+json")
    body = answer.json()
    assert body["effect"] == {
        "queues": 1,
        "messages": LONG,
        "examples": [{"name": "queue/alice/builds", "vhost": "/", "messages": LONG}],
    }
    assert isinstance(body["confirm"], str)
    assert set(body) == {"effect", "confirm", "type", "title", "status", "detail", "instance"}
    assert body["detail"].startswith("This deletes 1 queue with 420 messages. To confirm it, send the same request")
    assert limits_of(queue) == (False, None, None)
    assert not QueueEvent.objects.exists()
    assert not AuditEntry.objects.filter(event="changed", content_type__model="queue").exists()


def test_a_change_that_deletes_nothing_needs_no_confirmation(change, queue):
    Queue.objects.update(ready=300)
    assert change("nonsense").status_code == 200
    assert limits_of(queue) == (False, 10, 400)


def reason_of(answer):
    assert answer.status_code == 409
    assert answer.json()["confirm"]
    return answer.json()["detail"].partition(" This deletes")[0]


def test_an_expired_confirmation_asks_again(change):
    confirmation = change().json()["confirm"]
    with time_machine.travel(timezone.now() + timedelta(minutes=9, seconds=50), tick=False):
        assert change(confirmation).status_code == 200
    Queue.objects.update(max_length=None)
    with time_machine.travel(timezone.now() + timedelta(minutes=10, seconds=10), tick=False):
        assert reason_of(change(confirmation)) == "The confirmation has expired. It is valid for 10 minutes."


@pytest.mark.parametrize("forged", ["x", "a:b:c", ":", "\u202e", "{}", "x" * 5000])
def test_a_forged_confirmation_asks_again(change, queue, forged):
    genuine = change().json()["confirm"]
    for text in (forged, genuine[:-1], f"{forged}{genuine}"):
        assert reason_of(change(text)) == "The confirmation is invalid. Send it exactly as you got it."
    assert limits_of(queue) == (False, None, None)


ANOTHER = "The confirmation is for another change, or was given to another person."


def test_a_confirmation_is_for_one_person_and_these_values_of_these_objects_only(operator, pulse_user, queue):
    other = store("queue/alice/other", pulse_user=pulse_user)
    program, path = Program(operator), f"queues/{queue.uuid}/"
    confirmation = asked_by(program, path, {"max_length": 400, "warn_length": 10})
    for where, body in (
        (path, {"max_length": 399, "warn_length": 10}),
        (path, {"max_length": 400, "warn_length": 11}),
        (path, {"max_length": 400, "warn_length": 10, "unbounded": False}),
        (f"queues/{other.uuid}/", {"max_length": 400, "warn_length": 10}),
        ("pulse-users/alice/", {"max_length": 400, "warn_length": 10}),
    ):
        assert reason_of(program.patch(where, {**body, "confirm": confirmation})) == ANOTHER
    another = Program(Owner.objects.create_superuser("ops2@example.org"))
    body = {"max_length": 400, "warn_length": 10, "confirm": confirmation}
    assert reason_of(another.patch(path, body)) == ANOTHER


@pytest.fixture
def lower(operator, pulse_user, queue):
    """Return a function that lowers the Pulse user's thresholds, with a confirmation or without one."""
    program = Program(operator)
    return lambda confirmation="": program.patch(
        "pulse-users/alice/", {"warn_length": 10, "max_length": 20, "confirm": confirmation}
    )


@pytest.mark.parametrize("ready", [7000, 5], ids=["more messages", "fewer queues"])
def test_more_messages_or_fewer_queues_than_confirmed_do_not_ask_again(lower, pulse_user, queue, ready):
    store("queue/alice/second", pulse_user=pulse_user)
    confirmation = lower().json()["confirm"]
    Queue.objects.filter(pk=queue.pk).update(ready=ready)
    assert lower(confirmation).status_code == 200


def test_another_queue_in_the_effect_asks_again(lower, pulse_user):
    short = store("queue/alice/short", 5, pulse_user=pulse_user)
    confirmation = lower().json()["confirm"]
    Queue.objects.filter(pk=short.pk).update(ready=21)
    asked = lower(confirmation)
    assert reason_of(asked) == "The change now deletes 1 more queue than you confirmed."
    assert asked.json()["effect"]["queues"] == 2
    pulse_user.refresh_from_db()
    assert pulse_user.max_length is None
    assert lower(asked.json()["confirm"]).status_code == 200


def test_a_queue_that_grows_while_the_change_waits_for_its_row_is_in_the_effect(operator, transactional_db, pulse_user):
    queue = store(pulse_user=pulse_user, ready=5)
    with transaction.atomic():
        Queue.objects.filter(pk=queue.pk).update(ready=LONG)
        setting = in_background(partial(single.set_limits, queue, operator, warn_length=10, max_length=20))
        wait_until_blocked(setting)
    with pytest.raises(ConfirmationRequired, match="420"):
        setting.result(timeout=30)


def test_a_confirmation_of_100_000_queues_is_accepted(operator, pulse_user):
    effect = Effect([AffectedQueue(number, "/", str(number), 1) for number in range(0, 700_000, 7)])
    confirmation = removal_of([pulse_user], operator).question(effect).confirm
    body = ConfirmSerializer(data={"confirm": confirmation})
    assert body.is_valid()
    removal_of([pulse_user], operator, body.validated_data["confirm"]).require_confirmed(effect)


def test_two_operators_confirm_the_same_change_at_once(operator, transactional_db, pulse_user, queue):
    programs = [Program(operator), Program(Owner.objects.create_superuser("ops2@example.org"))]
    path, body = f"queues/{queue.uuid}/", {"warn_length": 10, "max_length": 20}
    confirmations = [asked_by(program, path, body) for program in programs]
    assert confirmations[0] != confirmations[1]
    answers = in_parallel(
        *(
            partial(program.patch, path, {**body, "confirm": confirmation})
            for program, confirmation in zip(programs, confirmations, strict=True)
        )
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert QueueEvent.objects.filter(kind="adjusted").count() == 1


def test_an_unconfirmed_change_of_a_pulse_user_leaves_its_other_fields(operator, alice, bob, pulse_user, queue):
    body = {"owners": ["bob@example.org"], "notification_emails": ["team@example.org"], "max_length": 20}
    program = Program(operator)
    confirmation = asked_by(program, "pulse-users/alice/", {**body, "warn_length": 10})
    assert list(pulse_user.owners.all()) == [alice]
    assert not pulse_user.notification_addresses.exists()
    body |= {"warn_length": 10, "confirm": confirmation}
    assert program.patch("pulse-users/alice/", body).status_code == 200
    assert list(pulse_user.owners.all()) == [bob]


@pytest.fixture
def live_pulse_user(pulse_user, create_pulse_user, guarded, amqp):
    """Return Alice's Pulse user on the broker, with a queue that a pass has listed."""
    create_pulse_user("alice", exactly=True)
    amqp.queue("queue/alice/builds", 3)
    run_once()
    return pulse_user


def test_a_pulse_user_with_queues_is_deleted_after_a_confirmation(
    live_pulse_user, operator, alice, management, guarded
):
    program = Program(alice)
    confirmation = asked_by(Program(operator), "pulse-users/alice/", {"warn_length": 1, "max_length": 2})
    assert reason_of(Program(operator).delete("pulse-users/alice/", {"confirm": confirmation})) == ANOTHER
    asked = program.delete("pulse-users/alice/")
    assert (asked.status_code, asked.json()["effect"]["messages"]) == (409, 3)
    live_pulse_user.refresh_from_db()
    assert live_pulse_user.removing_since is None
    assert queue_names(management, guarded) == {"queue/alice/builds"}
    assert program.delete("pulse-users/alice/", {"confirm": asked.json()["confirm"]}).status_code == 204
    assert queue_names(management, guarded) == set()


@pytest.fixture
def agents_queue(alice, compute):  # noqa: F811
    """Return the queue that an agent of Alice registered, as stored by a pass, with three messages."""
    subscription = make_subscription(alice, make_agent(alice, compute), offerings=[compute])
    return store_queue_row(subscription.queues.get())


def test_a_withdrawal_with_removal_deletes_queues_of_pulse_users_and_of_agents(
    operator, alice, queue, agents_queue, away
):
    create_token(alice, "agent")
    program, path = Program(operator), f"owners/{alice.uuid}/withdraw/"
    asked = program.post(path, {"remove": True})
    assert asked.status_code == 409
    assert {one["name"] for one in asked.json()["effect"]["examples"]} == {queue.name, agents_queue.name}
    alice.refresh_from_db()
    assert alice.vouched
    assert alice.auth_token_set.exists()
    assert program.post(path, {"remove": True, "confirm": asked.json()["confirm"]}).status_code == 200
    assert PulseUser.objects.get().removing_since is not None


def test_a_withdrawal_that_removes_nothing_needs_no_confirmation(operator, alice, queue, agents_queue):
    assert Program(operator).post(f"owners/{alice.uuid}/withdraw/").status_code == 200


def test_the_last_valid_token_is_revoked_after_a_confirmation(alice, agents_queue):
    last, other, expired = (create_token(alice, name)[0] for name in ("last", "other", "expired"))
    AuthToken.objects.filter(pk=expired.pk).update(expiry=timezone.now())
    visitor, path = Visitor(alice), f"tokens/{last.uuid}/"
    assert visitor.delete(f"tokens/{other.uuid}/").status_code == 204
    asked = visitor.delete(path)
    assert (asked.status_code, asked.json()["effect"]["messages"]) == (409, 3)
    assert AuthToken.objects.filter(pk=last.pk).exists()
    assert visitor.delete(path, {"confirm": asked.json()["confirm"]}).status_code == 204
    assert list(alice.auth_token_set.all()) == [expired]


def test_an_expired_token_is_revoked_without_a_question(alice, agents_queue):
    token, _ = create_token(alice, "expired")
    AuthToken.objects.update(expiry=timezone.now())
    assert Visitor(alice).delete(f"tokens/{token.uuid}/").status_code == 204


def test_a_program_revokes_its_own_token_without_a_question(alice, agents_queue):
    program = Program(alice)
    assert program.delete(f"tokens/{AuthToken.objects.get().uuid}/").status_code == 204


def test_a_shared_pulse_user_stays_without_a_question(operator, alice, bob, pulse_user, queue):
    pulse_user.owners.add(bob)
    assert Program(operator).post(f"owners/{alice.uuid}/withdraw/", {"remove": True}).status_code == 200


def test_only_who_may_make_a_change_learns_its_effect(change, alice, bob, queue):
    body = {"max_length": 400, "warn_length": 10, "confirm": change().json()["confirm"]}
    for person, status in ((alice, 403), (bob, 404)):
        for sent in ({**body, "confirm": ""}, body):
            assert Program(person).patch(f"queues/{queue.uuid}/", sent).status_code == status
    assert limits_of(queue) == (False, None, None)


def sent_again(page):
    """Return the hidden fields of the page, as a browser sends them."""
    hidden = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page.text)
    return {name: html.unescape(value) for name, value in hidden}


LOW = {"warn_length": "10", "max_length": "20"}

FACES = [
    ("/queues/{queue.uuid}/limits/", LOW, "{queue.name}"),
    ("/pulse-users/alice/thresholds/", LOW, "alice"),
    ("/owners/{alice.uuid}/", {"remove": "on", "reason": "Left the team."}, "{alice.email}"),
]
"""The forms that delete queues of Pulse users: their addresses, what is sent, and what is to be typed."""


def stored():
    """Return all rows that a change of these tests changes."""
    models = (Owner, PulseUser, Queue, AuthToken, Offering)
    return [list(model.objects.order_by("pk").values()) for model in models]


@pytest.mark.parametrize(("path", "form", "typed"), FACES)
def test_pages_ask_before_queues_of_pulse_users_are_deleted(admin, alice, pulse_user, queue, away, path, form, typed):
    path, typed = (text.format(queue=queue, alice=alice, pulse_user=pulse_user) for text in (path, typed))
    before = stored()
    page = admin.post(path, form)
    assert "This deletes 1 queue with 420 messages." in page.text
    page = admin.post(path, {**sent_again(page), "typed": typed[:-1]})
    assert 'class="errorlist' in page.text
    assert stored() == before
    assert not QueueEvent.objects.exists()
    assert admin.post(path, {**sent_again(page), "typed": typed}).status_code == 302
    assert stored() != before


def test_the_page_of_a_deletion_shows_the_messages_first(as_alice, live_pulse_user, amqp, management, guarded):
    path = "/pulse-users/alice/delete/"
    page = as_alice.get(path)
    assert "This deletes 1 queue with 3 messages." in page.text
    amqp.queue("queue/alice/newer", 1)
    run_once()
    page = as_alice.post(path, {**sent_again(page), "typed": "alice"})
    assert "The change now deletes 1 more queue than you confirmed. Nothing was deleted." in page.text
    assert "This deletes 2 queues with 4 messages." in page.text
    assert as_alice.post(path, {**sent_again(page), "typed": "alice"}).status_code == 302
    assert queue_names(management, guarded) == set()


AGENTS_FACES = [
    ("/admin/accounts/owner/{alice.pk}/change/", {"email": "alice@example.org", "full_name": "Alice"}),
    ("/admin/accounts/owner/{alice.pk}/delete/", {"post": "yes"}),
    ("/admin/agents/offering/{compute.pk}/delete/", {"post": "yes"}),
    ("/admin/agents/offering/", {"action": "delete_selected", "_selected_action": "{compute.pk}", "post": "yes"}),
]
"""The forms of the admin after which agents lose their queues: their addresses, and what is sent."""


@pytest.mark.parametrize(("path", "form"), AGENTS_FACES)
def test_the_admin_asks_before_agents_lose_their_queues(admin, alice, compute, agents_queue, away, path, form):  # noqa: F811
    path = path.format(alice=alice, compute=compute)
    form = {name: value.format(compute=compute) for name, value in form.items()}
    before = stored()
    page = admin.post(path, form)
    assert "This deletes 1 queue with 3 messages." in page.text
    assert stored() == before
    assert admin.post(path, sent_again(page)).status_code == 302
    assert stored() != before


@pytest.mark.parametrize(
    ("model", "action", "answers"),
    [
        (PulseUser, "set_thresholds", LOW),
        (Owner, "withdraw", {"remove": "on", "reason": ""}),
        (AuthToken, "revoke", {}),
    ],
)
def test_the_actions_of_lists_ask_before_queues_are_deleted(
    admin, alice, pulse_user, queue, agents_queue, away, model, action, answers
):
    token, _ = create_token(alice, "nightly")
    before = stored()
    page = choose_action(admin, model, action, {PulseUser: pulse_user, Owner: alice, AuthToken: token}[model])
    page = confirm(admin, page, **answers)
    assert re.search("This deletes [12] queues? with", page.text)
    assert stored() == before
    confirm(admin, page, **answers)
    assert stored() != before


def test_the_action_that_removes_pulse_users_shows_the_messages_first(admin, live_pulse_user, management, guarded):
    page = choose_action(admin, PulseUser, "remove", live_pulse_user)
    assert "This deletes 1 queue with 3 messages." in page.text
    assert messages_of(confirm(admin, page)) == ["1 is removed, with queues and exchanges: alice."]
    assert queue_names(management, guarded) == set()


def test_the_page_of_the_last_token_asks_before_agents_lose_their_queues(as_alice, alice, agents_queue):
    token, _ = create_token(alice, "nightly")
    path = f"/tokens/{token.uuid}/revoke/"
    page = as_alice.post(path)
    assert "This deletes 1 queue with 3 messages." in page.text
    wrong = as_alice.post(path, {"confirm": confirmation_in(page), "typed": "weekly"})
    assert wrong.status_code == 200
    assert AuthToken.objects.exists()
    assert as_alice.post(path, {"confirm": confirmation_in(page), "typed": "nightly"}).status_code == 302
    assert not AuthToken.objects.exists()


def test_one_confirmed_removal_covers_several_pulse_users(operator, pulse_user, queue):
    other = PulseUser.objects.create(username="other", ready=True)
    store("queue/other/builds", 1, pulse_user=other)
    question = removal_of([pulse_user, other], operator).question(effects.of_removal([pulse_user, other]))
    together = removal_of([other, pulse_user], operator, question.confirm)
    for one in (pulse_user, other):
        together.require_confirmed(effects.of_removal([one]))
    with pytest.raises(ConfirmationRequired):
        removal_of([pulse_user], operator, question.confirm).require_confirmed(effects.of_removal([pulse_user]))


def test_rows_of_two_models_with_one_key_are_two_changes(operator, queue):
    effect = effects.of_deletion([queue])
    rows = PulseUser(pk=1), Owner(pk=1)
    first, second = (ConfirmableChange(operator, "delete", [row], {}).question(effect) for row in rows)
    ConfirmableChange(operator, "delete", rows[:1], {}, first.confirm).require_confirmed(effect)
    with pytest.raises(ConfirmationRequired, match=ANOTHER):
        ConfirmableChange(operator, "delete", rows[:1], {}, second.confirm).require_confirmed(effect)
