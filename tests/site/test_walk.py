"""A new owner's path through the pages in a real browser with real mails and messages; accessibility of all pages."""

import re
import time
from urllib.parse import quote

import pytest
from django.test import Client
from playwright.sync_api import Page, expect

from accounts.access.tokens import create_token
from accounts.models import Invitation, Owner, PulseUser
from accounts.pulse_users.creation import create_pulse_user
from agents.models import Consumer, EventSubscription, Offering
from message_store import applications
from message_store import queues as stored_queues
from message_store.queues import MessageInput
from message_store.store import store
from notifications import sending
from queues.guard.once import run_once
from queues.models import Archive, MessageWatch, Queue
from queues.watching import starting
from rabbit.fetching import Fetched
from rabbit.management import Management
from tests.agents.test_subscription_pages import ODD, make_agent, make_consumer, make_subscription, store_queue_row
from tests.conftest import Amqp, Broker
from tests.support.archives import store_archive
from tests.support.chromium import sign_in, sizes_of_all_loaded, violations
from tests.support.toolbox import queue_names, stored_queue

pytestmark = pytest.mark.slow

SIGN_IN_CODE = re.compile(r"^\s*([A-Z0-9]{4}-?[A-Z0-9]{4})\s*$", re.MULTILINE)


@pytest.fixture
def username(management: Management):
    """Give a name of a Pulse user whose RabbitMQ user is deleted afterwards."""
    name = f"walker-{time.time_ns():x}"
    yield name
    if name in {user.name for user in management.users()}:
        management.delete_user(name)


class Program:
    """An owner's program: declares a queue and an exchange, and publishes messages."""

    def __init__(self, broker: Broker, vhost: str, username: str, password: str) -> None:
        address = f"amqp://{username}:{password}@{broker.amqp_url.rpartition('@')[2]}"
        self.channel = Amqp(address, vhost).channel
        self.exchange = f"exchange/{username}/events"
        self.queue = f"queue/{username}/builds"
        self.channel.exchange_declare(self.exchange, "topic", durable=True)
        self.channel.queue_declare(self.queue, durable=True)
        self.channel.queue_bind(self.queue, self.exchange, "#")

    def publish(self, messages: int) -> None:
        for number in range(messages):
            self.channel.basic_publish(self.exchange, "build.done", str(number).encode())


def test_a_new_owner_signs_in_creates_a_pulse_user_and_deletes_a_queue(
    page: Page, guarded, mailbox, broker, management, settings, live_server, username
):
    settings.GUARDIAN_BASE_URL = live_server.url
    settings.GUARDIAN_VOUCHED_DOMAINS = ["example.org"]

    page.clock.install()

    # Sign in with an address only.
    page.goto("/")
    page.get_by_role("navigation").get_by_role("link", name="Sign in").click()
    page.get_by_label("E-mail address").fill("newcomer@example.org")
    page.get_by_role("button", name="Send code").click()
    code = SIGN_IN_CODE.search(mailbox.wait_for(lambda mail: "newcomer@example.org" in mail.recipients).text)[1]
    page.get_by_label("Code").fill(code)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{live_server.url}/")

    # The empty list links to the first step.
    page.get_by_role("main").get_by_role("link", name=re.compile("Pulse user", re.IGNORECASE)).first.click()
    page.get_by_label("Name", exact=True).fill(username)
    page.get_by_role("button", name="Create Pulse user").click()
    password = page.locator("#password").text_content()
    page.get_by_role("link", name="Go to the Pulse user").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(username)
    assert password not in page.content()

    # A program's queue appears on the page and grows without a reload.
    program = Program(broker, guarded, username, password)
    name = program.queue
    program.publish(2)
    run_once()
    page.get_by_role("navigation").first.get_by_role("link", name="Queues").click()
    row = page.get_by_role("row").filter(has_text=name)
    expect(row).to_contain_text("healthy")
    program.publish(4)
    run_once()
    page.clock.fast_forward("00:05")
    expect(row).to_contain_text(re.compile("deleted in|over threshold"))

    # The warning links to the queue's page, whose chart has a text description.
    sending.send_due()
    warning = next(mail for mail in mailbox.mails if "newcomer@example.org" in mail.recipients and name in mail.subject)
    page.goto(re.search(rf"{re.escape(live_server.url)}(/queues/\S+/)", warning.text)[1])
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    figure = page.get_by_role("figure")
    expect(figure).to_contain_text("now 6")
    expect(figure.get_by_text("warning threshold 5")).to_be_visible()
    expect(figure.get_by_text("deletion limit 10")).to_be_visible()
    program.publish(1)
    run_once()
    page.clock.fast_forward("00:05")
    expect(figure).to_contain_text("now 7")

    # A deletion needs the typed name.
    page.get_by_role("link", name="Delete…").click()
    page.get_by_role("textbox").fill("queue/another/one")
    page.get_by_role("button", name="Delete the queue").click()
    expect(page.get_by_role("textbox")).to_have_attribute("aria-invalid", "true")
    assert name in queue_names(management, guarded)
    page.get_by_role("textbox").fill(name)
    page.get_by_role("button", name="Delete the queue").click()
    expect(page.get_by_role("main")).to_contain_text("deleted")
    assert name not in queue_names(management, guarded)

    # The queue comes back and grows: a last call, a deletion, and a first page that shows it until it is dismissed.
    program = Program(broker, guarded, username, password)
    program.publish(9)
    run_once()
    sending.send_due()
    mailbox.wait_for(lambda mail: "newcomer@example.org" in mail.recipients and "Last call" in mail.subject)
    program.publish(2)
    run_once()
    run_once()
    page.get_by_role("navigation").first.get_by_role("link", name="Home").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("1 queue deleted")
    expect(page.get_by_role("link", name="Bring it back")).to_be_visible()
    page.get_by_role("button", name="Dismiss").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("You have no queue")

    # Sign out.
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("You are signed out.")).to_be_visible()
    page.goto("/queues/")
    expect(page).to_have_url(re.compile("/signin/"))


@pytest.fixture
def populated(guarded, amqp: Amqp, broker, management, username):
    """Create something to show on every page, and give an operator."""
    alice = Owner.objects.create_user("alice@example.org", vouched=True)
    operator = Owner.objects.create_superuser("ops@example.org")
    pulse_user, _ = create_pulse_user(username, [alice, operator], notification_emails=["team@example.org"])
    Invitation.objects.create(pulse_user=pulse_user, invitee=operator, inviter=alice)
    token, _ = create_token(operator, "for the builds")
    offering = Offering.objects.create(name="Compute")
    identity = make_agent(alice, offering, "agent-1", version="1.0.5")
    subscription = make_subscription(alice, identity, "order", [offering], token=token)
    store_queue_row(subscription.queues.get(), ready=7, state="warned")
    make_subscription(alice, identity, "resource_end_date_change_request", [offering], state="creating")
    make_consumer(make_agent(alice, offering, ODD), ["order", "resource", "user_role"])
    make_subscription(alice, description="The ticket system", offerings=[offering])
    applications.create_application("notices")
    stored = stored_queues.create("notices", ODD.replace("/", "") + "x" * 20, principals="bid:ops@example.org")
    (posted,) = stored_queues.post_all(stored, [MessageInput(f"{ODD} {'x' * 400}".encode(), content_type="text/plain")])
    stored_queues.set_positions(stored, "mailer", {"1": posted.id.hex})
    amqp.queue(f"queue/{pulse_user}/builds", messages=7)
    amqp.queue(f'queue/{pulse_user}/<b>"odd"&\u202e', messages=1)
    amqp.channel.exchange_declare(f"exchange/{pulse_user}/events", "topic", durable=True)
    amqp.channel.queue_bind(f"queue/{pulse_user}/builds", f"exchange/{pulse_user}/events", "linux.#")
    starting.start_at_exchange(operator, f"exchange/{pulse_user}/events", "#")
    amqp.channel.basic_publish(f"exchange/{pulse_user}/events", ODD, b'{"a": 1}')
    run_once()
    archived = Fetched(b'{"a": 1}', {"content_type": ODD}, {ODD: {"n": 1}}, "", ODD, False)
    archive = store_archive(archived, archived, name=f"queue/{pulse_user}/{ODD}", vhost=guarded)
    archive.replays.create(to_queue="queue", first=1, last=2, sent=1, by=operator, created=archive.created)
    archive.replays.create(to_queue=ODD, first=1, last=2, state="failed", error=ODD, created=archive.created)
    builds = Queue.objects.get(name__endswith="/builds")
    builds.moves.create(to_queue=ODD, total=2, sent=1, by=operator, created=archive.created)
    builds.moves.create(to_exchange=ODD, total=2, state="failed", error=ODD, created=archive.created)
    gone = stored_queue(f"queue/{pulse_user}/gone", vhost=guarded, state="gone", pulse_user=pulse_user)
    gone.new_event("deleted", at=archive.created, length=11, max=10).save()
    store_archive(b"1", name=gone.name, vhost=guarded, queue=gone)
    return operator


def addresses_of_pages() -> dict[str, str]:
    """Return the addresses of all pages by name."""
    queue = Queue.objects.get(name__endswith="/builds")
    odd = Queue.objects.get(name__contains="<b>")
    username = PulseUser.objects.get().username
    alice = Owner.objects.get(email="alice@example.org")
    token = Owner.objects.get(email="ops@example.org").auth_token_set.get()
    subscription = EventSubscription.objects.get(object_type="order")
    consumer = Consumer.objects.get()
    archive = Archive.objects.get(messages=2)
    return {
        "front page": "/",
        "queues": "/queues/",
        "queue": f"/queues/{queue.uuid}/",
        "queue, week": f"/queues/{queue.uuid}/?span=week",
        "queue, delete": f"/queues/{queue.uuid}/delete/",
        "queue, purge": f"/queues/{queue.uuid}/purge/",
        "queue, messages": f"/queues/{queue.uuid}/messages/",
        "queue, gone": f"/queues/{Queue.objects.get(name__endswith='/gone').uuid}/",
        "queue, move": f"/queues/{queue.uuid}/move/",
        "queue, move, check": f"/queues/{odd.uuid}/move/?to=queue&name={quote(queue.name)}",
        "queue, dead letters": f"/queues/{queue.uuid}/dead-letters/",
        "move, running": f"/queues/{queue.uuid}/moves/{queue.moves.get(state='running').uuid}/",
        "move, failed": f"/queues/{queue.uuid}/moves/{queue.moves.get(state='failed').uuid}/",
        "archives": "/archives/",
        "archives, none found": "/archives/?search=nothing-like-this",
        "archive": f"/archives/{archive.uuid}/",
        "archive, message": f"/archives/{archive.uuid}/messages/1/",
        "archive, delete": f"/archives/{archive.uuid}/delete/",
        "restore": f"/archives/{archive.uuid}/restore/?to=queue&name={quote(queue.name)}",
        "restore, refused": f"/archives/{archive.uuid}/restore/?to=queue",
        "replay, running": f"/archives/{archive.uuid}/replays/{archive.replays.get(state='running').uuid}/",
        "replay, failed": f"/archives/{archive.uuid}/replays/{archive.replays.get(state='failed').uuid}/",
        "Pulse users": "/pulse-users/",
        "Pulse user": f"/pulse-users/{username}/",
        "Pulse user, delete": f"/pulse-users/{username}/delete/",
        "Pulse user, remove an owner": f"/pulse-users/{username}/owners/{alice.uuid}/remove/",
        "Pulse user, leave": f"/pulse-users/{username}/owners/{token.user.uuid}/remove/",
        "invitation": f"/invitations/{Invitation.objects.get().uuid}/",
        "invitation, not open": f"/invitations/{alice.uuid}/",
        "exchanges": "/exchanges/",
        "exchange": f"/exchanges/exchange/?name=exchange/{username}/events",
        "exchange, watch": f"/exchanges/watch/?name=exchange/{username}/events",
        "watch": f"/exchanges/watches/{MessageWatch.objects.get().uuid}/",
        "exchange, delete": f"/exchanges/delete/?name=exchange/{username}/events",
        "agents": "/agents/",
        "agents, none found": "/agents/?search=nothing-like-this",
        "agent, remove": f"/agents/{subscription.identity.uuid}/remove/",
        "subscription, remove": f"/agents/subscriptions/{subscription.uuid}/remove/",
        "consumer, remove": f"/agents/consumers/{consumer.uuid}/remove/",
        "message store": "/message-store/",
        "stored queues": "/message-store/notices/",
        "stored queue": f"/message-store/notices/{quote(store().queues('notices')[0].name, safe='')}/",
        "tokens": "/tokens/",
        "token, revoke": f"/tokens/{token.uuid}/revoke/",
        "settings": "/settings/",
        "owners": "/owners/",
        "vouching": "/vouching/",
        "API": "/api/docs/",
        "API, a resource": "/api/docs/queues/",
        "help": "/help/",
        "help, owners": "/help/owners/",
        "help, settings": "/help/settings/",
        "not found": "/no/such/page/",
        "administration": "/admin/",
        "administration, queues": "/admin/queues/queue/",
        "administration, queue": f"/admin/queues/queue/{queue.id}/change/",
        "administration, offerings": "/admin/agents/offering/",
        "administration, offering": f"/admin/agents/offering/{subscription.identity.offering_id}/change/",
        "administration, agent": f"/admin/agents/agentidentity/{subscription.identity_id}/change/",
        "administration, owner": f"/admin/accounts/owner/{alice.id}/change/",
        "administration, delete": f"/admin/agents/offering/{subscription.identity.offering_id}/delete/",
        "administration, audit trail": "/admin/operate/trail/",
    }


def test_every_page_is_accessible_small_and_fits_a_phone(page: Page, populated):
    """Check with axe-core in wide and narrow windows, light and dark. The fixture ``page`` checks the CSP."""
    sign_in(page, populated)
    found = []
    for name, address in addresses_of_pages().items():
        found += violations(page, address)
        scripts_are_djangos = name.startswith("administration")
        if not scripts_are_djangos and (sum(sizes := sizes_of_all_loaded(page)) > 150_000 or len(sizes) > 12):
            found.append(f"{name} loads {sum(sizes):,} bytes in {len(sizes)} requests")
    assert found == []


def test_every_page_has_a_content_security_policy(client: Client, populated):
    client.force_login(populated)
    for address in addresses_of_pages().values():
        policy = client.get(address)["Content-Security-Policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


def test_a_refresh_keeps_what_is_selected_and_focused(page: Page, populated):
    page.clock.install()
    sign_in(page, populated)
    page.goto("/queues/")
    row = page.get_by_role("row").filter(has_text="/builds")
    row.get_by_role("checkbox").check()
    row.get_by_role("link").focus()
    Queue.objects.filter(name__endswith="/builds").update(ready=9)
    page.clock.fast_forward("00:05")
    expect(row).to_contain_text("9")
    expect(row.get_by_role("checkbox")).to_be_checked()
    expect(row.get_by_role("link")).to_be_focused()
    expect(page.get_by_role("button", name="Delete…")).to_be_visible()
    row.get_by_role("link").click()
    page.get_by_text("More", exact=True).click()
    page.get_by_role("link", name="Mute…").focus()
    Queue.objects.filter(name__endswith="/builds").update(ready=11)
    page.clock.fast_forward("00:05")
    expect(page.get_by_role("figure")).to_contain_text("now 11")
    expect(page.get_by_role("link", name="Mute…")).to_be_focused()


def test_a_queue_can_be_opened_with_the_keyboard(page: Page, populated):
    sign_in(page, populated)
    page.goto("/queues/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(40):
        page.keyboard.press("Tab")
        if "/builds" in page.evaluate("document.activeElement.textContent"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("/builds")
