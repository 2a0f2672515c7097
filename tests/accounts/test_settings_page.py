"""The settings page: an owner's channels, quiet hours and weekly summary."""

import pytest
from django.urls import reverse

from notifications import channels
from notifications.models import Channel

pytestmark = pytest.mark.django_db

URL = "https://hooks.example.org/s3cr3t-path"


@pytest.fixture
def room(alice):
    return channels.create_channel(alice, "the room", URL)


def test_an_owner_adds_a_channel_and_its_url_is_hidden(as_alice, alice):
    assert "the room" in as_alice.post("/settings/", {"channel": "add", "name": "the room", "url": URL}).text
    text = as_alice.get("/settings/").text
    assert "Webhook at hooks.example.org" in text
    assert "s3cr3t" not in text
    assert alice.channels.get().name == "the room"


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"name": "", "url": URL}, "This field is required"),
        ({"name": "room", "url": "https://127.0.0.1/"}, "private address"),
    ],
)
def test_an_invalid_channel_has_an_error_at_the_field(as_alice, room, form, error):
    response = as_alice.post("/settings/", {"channel": "add", **form})
    assert response.status_code == 200
    assert error in response.text
    assert 'aria-invalid="true"' in response.text
    assert Channel.objects.count() == 1


def test_an_owner_sends_a_test_message_and_sees_why_it_fails(as_alice, alice, private_channels, webhook):
    room = channels.create_channel(alice, "the room", webhook.url())
    address = reverse("channel_test", args=[room.uuid])
    assert "The test message to the room was sent." in as_alice.post(address, follow=True).text
    assert len(webhook.received) == 1
    webhook.status = 404
    text = as_alice.post(address, follow=True).text
    assert "did not arrive: it answered 404" in text
    assert '<span class="state critical">failed</span>' in text
    assert "s3cr3t" not in text


def test_an_owner_deletes_a_channel_after_confirmation(as_alice, room):
    address = reverse("channel_delete", args=[room.uuid])
    assert "Delete the channel <bdi>the room</bdi>?" in as_alice.get(address).text
    assert Channel.objects.exists()
    assert "was deleted" in as_alice.post(address, follow=True).text
    assert not Channel.objects.exists()
    assert as_alice.post(address).status_code == 404


def test_quiet_hours_are_saved_and_shown(as_alice, alice):
    form = {"quiet": "save", "quiet_from": "22:00", "quiet_until": "07:00", "time_zone": "Europe/Berlin"}
    text = as_alice.post("/settings/", form, follow=True).text
    assert "Your quiet hours are saved." in text
    for value in ("22:00", "07:00", "Europe/Berlin"):
        assert f'value="{value}"' in text
    form.update(quiet_from="", quiet_until="")
    assert "You have no quiet hours." in as_alice.post("/settings/", form, follow=True).text
    alice.refresh_from_db()
    assert alice.quiet_from is None


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"quiet_from": "25:00"}, "Enter a valid time"),
        ({"quiet_until": ""}, "both the start and the end"),
    ],
)
def test_invalid_quiet_hours_have_an_error_at_the_field(as_alice, alice, form, error):
    whole = {"quiet": "save", "quiet_from": "22:00", "quiet_until": "07:00", "time_zone": "UTC", **form}
    response = as_alice.post("/settings/", whole)
    assert response.status_code == 200
    assert error in response.text
    alice.refresh_from_db()
    assert alice.quiet_from is None


def test_the_weekly_summary_is_turned_off_and_on(as_alice, alice):
    assert "no more weekly summaries" in as_alice.post("/settings/", {"weekly": "save"}, follow=True).text
    alice.refresh_from_db()
    assert not alice.weekly_summary
    as_alice.post("/settings/", {"weekly": "save", "weekly_summary": "on"})
    alice.refresh_from_db()
    assert alice.weekly_summary
