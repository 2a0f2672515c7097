"""Channels: chat rooms, phones and webhooks that get an owner's notifications, through apprise.

The address of a channel is a secret, because anybody who has it can post there. It is sealed in the database, and never
appears in logs, errors or pages, which show the service and host. Messages are sent over HTTPS, and only to public
addresses unless an operator allows others; ``public_https.py`` checks this for each message.
"""

import hashlib
import hmac
import json
import logging
import re
import secrets
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from apprise import Apprise, AppriseAsset, NotifyBase, NotifyFormat, NotifyType, OverflowMode, PersistentStoreMode
from apprise.conversion import convert_between
from apprise.plugins import url_to_dict
from apprise.plugins.custom_json import NotifyJSON
from apprise.plugins.opsgenie import OPSGENIE_API_LOOKUP, NotifyOpsgenie
from apprise.plugins.pagerduty import NotifyPagerDuty
from apprise.plugins.telegram import NotifyTelegram
from django.conf import settings
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts.access import quotas, vouching
from accounts.models import Owner
from core import limits, sealing
from core.refusals import Refusal
from core.texts import check_line
from notifications import events, public_https
from notifications.events import Event
from notifications.kinds import Severity
from notifications.models import Channel

TEST_LOCK_SECONDS = 15
"""A killed sender blocks the owner's next test for this long. A test takes at most 9 seconds."""

MAX_NAME_LENGTH = 100
MAX_URL_LENGTH = 2000

# The allowed services, whose messages are single requests over HTTPS, and the host that pages show; empty: the host of
# the address. Apprise has more than a hundred others. Some of them send paid mail or SMS, use plain TCP, write files,
# or notify the desktop of the machine.
SERVICES = {
    "discord": "discord.com",
    "flock": "flock.com",
    "gchat": "chat.googleapis.com",
    "gotifys": "",
    "jsons": "",
    "mmosts": "",
    "nctalks": "",
    "ntfys": "",
    "opsgenie": "opsgenie.com",
    "pagerduty": "pagerduty.com",
    "pover": "pushover.net",
    "rockets": "",
    "slack": "slack.com",
    "synologys": "",
    "tgram": "telegram.org",
    "webex": "webexapis.com",
    "workflow": "",
    "workflows": "",
    "wxteams": "webexapis.com",
    "zoom": "zoom.us",
}

WEBHOOK = "Webhook"

FOR_PROGRAMS = (WEBHOOK, str(NotifyPagerDuty.service_name), str(NotifyOpsgenie.service_name))
"""Services that get each notification by itself, because programs read it."""

SIGNATURE = "X-Guardian-Signature"
"""The header with the HMAC-SHA256 of the body, in hexadecimal digits after "sha256=", of messages to webhooks."""

NOTIFY_TYPES = {
    Severity.CRITICAL: NotifyType.FAILURE,
    Severity.WARNING: NotifyType.WARNING,
    Severity.NORMAL: NotifyType.SUCCESS,
    Severity.INFO: NotifyType.INFO,
}
OPSGENIE_PRIORITIES = {Severity.CRITICAL: 1, Severity.WARNING: 3, Severity.INFO: 5}
"""P1 is the highest. A normal one closes the alert."""

# Mentions, and links and images of Markdown, which may occur in a queue's name. A character of no width after the match
# disables them, and the text looks the same. Mentions of everybody are disabled in mail addresses too, as services
# differ in where they recognize them.
MARKUP = re.compile(r"(?<!\w)@(?=\w)|@(?=(?:everyone|channel|here|all|room)\b)|<(?=\S)|\](?=[(\[])", re.IGNORECASE)

# Apprise's query parameters that are refused: they attach local files, turn off certificate checks, follow redirects,
# or change timeouts.
REFUSED_OPTIONS = {"attach", "cto", "redirect", "retry", "rto", "store", "template", "verify", "wait"}

# At some levels apprise logs full addresses. ``ChannelFailed`` reports failures.
logging.getLogger("apprise").addFilter(lambda record: False)


class BadChannel(Refusal):
    """The address is not usable for a channel. The text says why, without the address."""

    field = "url"


class ChannelFailed(Refusal):
    """A message was not delivered. The text says why and what to do, without the address."""

    status = HTTPStatus.CONFLICT


def create_channel(owner: Owner, name: str, url: str) -> Channel:
    """Create and return a channel of this owner, without sending anything.

    ``url`` is an https:// address, or apprise's address of a service in ``SERVICES``.

    Raises:
        accounts.access.vouching.NotVouched: the owner is not vouched.
        BadChannel: the address is not usable.
        ValidationError: the name is invalid or taken; its key is ``name``.
        Refusal: the owner has ``GUARDIAN_MAX_CHANNELS``.
    """
    vouching.require_vouched(owner)
    name = name.strip()
    try:
        check_line(name, MAX_NAME_LENGTH)
    except ValidationError as error:
        why = f"Enter a name of 1 to {MAX_NAME_LENGTH} visible characters."
        raise ValidationError({"name": why}) from error
    sender = _sender(url.strip())
    sealed = sealing.seal(sealing.CHANNELS, url.strip())
    secret = sealing.seal(sealing.SIGNING, secrets.token_hex(32)) if sender.service == WEBHOOK else ""
    try:
        with transaction.atomic():
            quotas.require_room(quotas.CHANNELS, owner, owner.channels.all())
            return Channel.objects.create(
                owner=owner, name=name, service=sender.shown(), sealed_url=sealed, sealed_secret=secret
            )
    except IntegrityError as error:
        raise ValidationError({"name": "You have a channel of this name; choose another name."}) from error


def secret_of(channel: Channel) -> str:
    """Return what messages to this webhook are signed with, or an empty text. Show it only once."""
    return sealing.unseal(sealing.SIGNING, channel.sealed_secret) if channel.sealed_secret else ""


def is_for_programs(channel: Channel) -> bool:
    return channel.service.partition(" at ")[0] in FOR_PROGRAMS


def test_channel(channel: Channel) -> None:
    """Send a test message now, and record the result. An owner sends one at a time.

    Raises ChannelFailed, also if another test of the owner is running, and NotVouched.
    """
    vouching.require_vouched(channel.owner)
    body = f"Messages about your queues arrive here.\n{settings.GUARDIAN_BASE_URL}"
    key = f"channel-test:{channel.owner_id}"
    if not limits.add(key, True, TEST_LOCK_SECONDS):
        raise ChannelFailed("another test is running; wait for it to finish")
    try:
        send(channel, "This is a test from Guardian", body)
    finally:
        cache.delete(key)


def send(channel: Channel, title: str, body: str) -> None:
    """Send a test message now, and record the result. It takes at most 9 seconds. Raises ChannelFailed."""
    try:
        post(channel, title, body, events.of_test(timezone.now().isoformat()))
    except ChannelFailed as error:
        record_result(channel, str(error))
        raise
    record_result(channel)


def post(channel: Channel, title: str, body: str, event: Event) -> None:
    """Send a message now, without using the database. The body is truncated to the service's limit.

    Services show a critical message as a failure, in red where they have colours.

    Raises ChannelFailed.
    """
    try:
        sender = _sender(sealing.unseal(sealing.CHANNELS, channel.sealed_url))
        secret = secret_of(channel).encode()
    except sealing.CannotUnseal as error:
        raise ChannelFailed(
            "Guardian has another key now, so it can't read the address; delete the channel and add it again"
        ) from error
    except BadChannel as error:
        raise ChannelFailed(str(error).rstrip(".")) from error
    if sender.service != WEBHOOK:
        title, body = (MARKUP.sub("\\g<0>\N{ZERO WIDTH SPACE}", text) for text in (title, body))
    public_https.confine(sender.plugin)

    def signed(content: bytes) -> dict[str, str]:
        return {SIGNATURE: f"sha256={hmac.new(secret, content, hashlib.sha256).hexdigest()}"} if secret else {}

    delivered, attempt = public_https.run_with_deadline(lambda: _notify(sender.plugin, title, body, event), signed)
    if not delivered or attempt.status is None:
        raise ChannelFailed(_why(attempt))


def _notify(plugin: NotifyBase, title: str, body: str, event: Event) -> bool:
    """Send a message through a plugin. On-call services open an incident, or end the one that an earlier one opened."""
    if isinstance(plugin, NotifyJSON):
        plugin.payload_extras.update(event.fields)
    elif isinstance(plugin, NotifyPagerDuty):
        plugin.action, plugin.dedup, plugin.click, plugin.source = "map", event.incident, event.url, "Guardian"
    elif isinstance(plugin, NotifyOpsgenie):
        if event.severity is Severity.NORMAL:
            return _close_alert(plugin, body, event)
        plugin.action, plugin.alias, plugin.entity = "new", event.incident, None
        plugin.priority, plugin.batch_size = OPSGENIE_PRIORITIES[event.severity], max(1, len(plugin.targets))
    body_format = NotifyFormat.TEXT
    if isinstance(plugin, NotifyTelegram):  # the only plugin that takes the text for HTML instead of converting it
        body_format = plugin.resolve_format(body_format)
        title, body = (convert_between(NotifyFormat.TEXT, body_format, text) for text in (title, body))  # type: ignore[no-untyped-call]
    return bool(
        plugin.notify(
            body,
            title,
            notify_type=NOTIFY_TYPES[event.severity],
            body_format=body_format,
            overflow=OverflowMode.TRUNCATE,
        )
    )


def _close_alert(plugin: NotifyOpsgenie, note: str, event: Event) -> bool:
    """Close an alert by its alias. Apprise closes only those that the same process opened."""
    answer = public_https.client.post(
        f"{OPSGENIE_API_LOOKUP[str(plugin.region_name)]}/{event.incident}/close",
        data=json.dumps({"source": "Guardian", "note": note}),
        params={"identifierType": "alias"},
        headers={"Content-Type": "application/json", "Authorization": f"GenieKey {plugin.apikey}"},
        timeout=plugin.request_timeout,
    )
    return answer.status_code in (HTTPStatus.OK, HTTPStatus.ACCEPTED)


def record_result(channel: Channel, error: str = "") -> None:
    result: dict[str, Any] = (
        {"last_error": error[:300]} if error else {"last_error": "", "last_sent_at": timezone.now()}
    )
    Channel.objects.filter(id=channel.id).update(**result)
    for name, value in result.items():
        setattr(channel, name, value)


class _Sender(NamedTuple):
    plugin: NotifyBase
    service: str
    host: str

    def shown(self) -> str:
        """Return the service and host, which are not secret, as pages show them."""
        return f"{self.service} at {self.host}"[:100]


def _sender(url: str) -> _Sender:
    """Return the sender for this address. Raises BadChannel if the address is malformed or not allowed."""
    if len(url) > MAX_URL_LENGTH or any(character.isspace() or not character.isprintable() for character in url):
        raise BadChannel(f"An address has at most {MAX_URL_LENGTH} characters, and contains no spaces.")
    scheme = url.partition("://")[0].lower()
    if scheme == "http":
        raise BadChannel("Messages are sent over HTTPS only; enter an address that begins with https://.")
    parsed: dict[str, Any] | None = url_to_dict(url) if scheme == "https" or scheme in SERVICES else None  # type: ignore[no-untyped-call]
    if parsed is not None and parsed["schema"] in SERVICES:
        sender = _service_sender(parsed)
    elif scheme == "https":
        sender = _webhook_sender(url)
    elif scheme in SERVICES:
        raise BadChannel(f"The {scheme}:// address is incomplete; check that you copied all of it.")
    else:
        raise BadChannel(
            "Enter the https:// address that the service gave you for incoming messages (a webhook), "
            f"or an address for apprise that begins with {', '.join(f'{name}://' for name in SERVICES)}."
        )
    try:
        public_https.require_public_literal(sender.host)
    except public_https.Unreachable as error:
        raise BadChannel(f"The address can't be used: {error}.") from error
    return sender


def _service_sender(parsed: dict[str, Any]) -> _Sender:
    refused = sorted(REFUSED_OPTIONS & set(parsed["qsd"]))
    if refused:
        raise BadChannel(f"The option '{refused[0]}' is not allowed; remove it from the address.")
    schema = parsed["schema"]
    plugin = Apprise.instantiate(parsed, asset=_asset())
    if plugin is None:
        raise BadChannel("The service does not recognize this address; check that you copied all of it.")
    if str(getattr(plugin, "mode", "")) == "cloud":  # the address of ntfy.sh has a topic in place of the host
        return _Sender(plugin, str(plugin.service_name), "ntfy.sh")
    service = WEBHOOK if isinstance(plugin, NotifyJSON) else str(plugin.service_name)
    return _Sender(plugin, service, SERVICES[schema] or str(plugin.host))


def _webhook_sender(url: str) -> _Sender:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadChannel("The address is invalid; check that you copied all of it.") from error
    if not host or parts.fragment:
        raise BadChannel("The address is not a webhook's: it has no host, or contains a '#'.")
    plugin = NotifyJSON(  # type: ignore[no-untyped-call]
        schema="jsons",
        secure=True,
        host=f"[{host}]" if ":" in host else host,
        port=port,
        user=parts.username,
        password=parts.password,
        fullpath=parts.path or "/",
        params=parse_qs(parts.query, keep_blank_values=True),
        asset=_asset(),
    )
    return _Sender(plugin, WEBHOOK, host)


def _asset() -> AppriseAsset:
    return AppriseAsset(
        app_id="Guardian",
        app_desc="Guardian",
        app_url=settings.GUARDIAN_BASE_URL,
        image_url_mask="",
        image_url_logo="",
        http_redirects=False,
        async_mode=False,
        storage_mode=PersistentStoreMode.MEMORY,
    )


def _why(attempt: public_https.Attempt) -> str:
    status = attempt.status
    if attempt.reason or status is None:
        return attempt.reason or "nothing was sent; check the address"
    if status in (401, 403):
        return f"it answered {status}: it no longer accepts the address; create a new one there and enter it here"
    if status in (404, 410):
        return f"it answered {status}: the address no longer exists; create a new one there and enter it here"
    if 300 <= status < 400:
        return f"it answered {status}: a redirect, which is not followed; enter the address that it leads to"
    if status == 429:
        return "it answered 429: it got too many messages; later ones may be accepted"
    if status >= 500:
        return f"it answered {status}: the service failed; see its status page"
    if status >= 400:
        return f"it answered {status}: it does not accept this message; check that the address is one for messages"
    return f"it answered {status}, and did not accept the message"
