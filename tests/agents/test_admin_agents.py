"""Agents in the admin: offerings are created there; registrations are shown and deleted."""

import pytest
from django.core.management import CommandError, call_command

from accounts.access.tokens import create_token
from accounts.access.vouching import vouch
from accounts.models import Owner
from agents.models import AgentIdentity, AgentVhost, Consumer, EventSubscription, Offering, SubscriptionQueue
from core.models import Removal
from tests.agents.test_subscription_pages import compute  # noqa: F401
from tests.support.agents import make_agent, make_consumer, make_subscription
from tests.support.toolbox import AWAY


@pytest.fixture
def rows(alice, operator, compute, settings):  # noqa: F811
    """Return one row of each model, by its name. The broker is unavailable, so removals stay pending."""
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    token, _ = create_token(alice, "agent")
    identity = make_agent(alice, compute)
    subscription = make_subscription(alice, identity, offerings=[compute], token=token)
    return {
        "agentidentity": identity,
        "eventsubscription": subscription,
        "subscriptionqueue": subscription.queues.get(),
        "consumer": make_consumer(identity, token=token),
        "agentvhost": AgentVhost.objects.create(owner=alice, name=alice.uuid.hex, ready=True),
    }


def test_an_operator_creates_an_offering_with_members_and_publishers(admin, alice, bob):
    form = {"name": "Storage", "members": [alice.pk, bob.pk], "publishers": [bob.pk]}
    assert admin.post("/admin/agents/offering/add/", form).status_code == 302
    offering = Offering.objects.get(name="Storage")
    assert (set(offering.members.all()), set(offering.publishers.all())) == ({alice, bob}, {bob})
    page = admin.get(f"/admin/agents/offering/{offering.pk}/change/").text
    assert str(offering.uuid) in page
    uuid = offering.uuid
    form = {"name": "Storage, fast", "uuid": "0" * 32, "members": [alice.pk], "publishers": []}
    assert admin.post(f"/admin/agents/offering/{offering.pk}/change/", form).status_code == 302
    offering.refresh_from_db()
    assert (offering.name, offering.uuid, list(offering.members.all())) == ("Storage, fast", uuid, [alice])


@pytest.mark.parametrize("name", ["a\nb", "a\x85b", "a\u2028b", "Clu\u202ester", "Clu\u200bster"])
def test_the_admin_and_the_command_refuse_the_same_offering_names(admin, compute, name):  # noqa: F811
    with pytest.raises(CommandError) as refused:
        call_command("create_offering", name)
    for address in ("/admin/agents/offering/add/", f"/admin/agents/offering/{compute.pk}/change/"):
        page = admin.post(address, {"name": name})
        [error] = page.context["adminform"].form.errors["name"]
        assert error.startswith("The text contains a")
        assert error in str(refused.value)
    assert [offering.name for offering in Offering.objects.all()] == ["Compute"]


def test_deleting_an_offering_lists_and_removes_its_registrations(admin, compute, rows):  # noqa: F811
    page = admin.get("/admin/agents/offering/").text
    assert 'class="field-agents">1</td>' in page
    assert 'class="field-queues">1</td>' in page
    address = f"/admin/agents/offering/{compute.pk}/delete/"
    page = admin.get(address).text
    for row in ("agentidentity", "subscriptionqueue", "consumer"):
        assert str(rows[row]) in page
    assert Offering.objects.filter(pk=compute.pk).exists()
    assert admin.post(address, {"post": "yes"}).status_code == 302
    for model in (AgentIdentity, EventSubscription, SubscriptionQueue, Consumer):
        assert not model.objects.exists()
    going = set(Removal.objects.values_list("kind", "name"))
    assert going >= {
        ("queue", rows["subscriptionqueue"].queue_name),
        ("queue", rows["consumer"].queue_name),
        ("user", rows["eventsubscription"].rmq_username),
        ("user", rows["consumer"].rmq_username),
    }


def test_a_bulk_deletion_schedules_removals_from_the_broker(admin, rows):
    chosen = [rows["eventsubscription"].pk]
    form = {"action": "delete_selected", "_selected_action": chosen, "post": "yes"}
    assert admin.post("/admin/agents/eventsubscription/", form).status_code == 302
    assert not EventSubscription.objects.exists()
    assert Removal.objects.filter(kind="user", name=rows["eventsubscription"].rmq_username).exists()


def test_deleting_an_owner_lists_and_removes_their_agents(admin, alice, operator, rows):
    vouch(alice, operator, "a colleague")
    address = f"/admin/accounts/owner/{alice.pk}/delete/"
    page = admin.get(address).text
    for name in ("agentidentity", "subscriptionqueue", "consumer", "agentvhost"):
        assert str(rows[name]) in page
    assert "Are you sure" in page
    assert admin.post(address, {"post": "yes"}).status_code == 302
    assert not Owner.objects.filter(pk=alice.pk).exists()
    assert Removal.objects.filter(kind="vhost", name=rows["agentvhost"].name).exists()
