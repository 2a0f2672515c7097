"""Where owners are told beside e-mail: chat rooms, telephones and webhooks, through apprise.

The address of a channel is a secret, since whoever has it can write there. It is sealed in the database, and stands in
no log, no error and no page: a channel is shown as its service and host. It takes messages over HTTPS, and lies at a
public address unless an operator allows others; ``public_https.py`` sees to that whenever one is sent.
"""

import logging
import re
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from apprise import Apprise, AppriseAsset, NotifyBase, NotifyFormat, OverflowMode, PersistentStoreMode
from apprise.plugins import url_to_dict
from apprise.plugins.custom_json import NotifyJSON
from django.conf import settings
from django.core.cache import cache
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts import vouching
from accounts.models import Owner, check_line
from core import limits, sealing
from notifications import public_https
from notifications.models import Channel

MAX_CHANNELS = 10
"""So many may an owner have: each of them gets every message."""

TEST_LOCK_SECONDS = 15
"""For so long an owner's next test waits where the process that sends one is killed. One takes 12 seconds at most."""

MAX_NAME_LENGTH = 100
MAX_URL_LENGTH = 2000

# The services whose messages are single requests over HTTPS, and the host that is shown; empty: the address has its
# own. A list of what is let through: apprise knows more than a hundred others, among them some that send mail or SMS
# at somebody's cost, open incidents that somebody has to close, speak plain TCP, keep files, or talk to the desktop of
# the machine they run on.
SERVICES = {
    "discord": "discord.com",
    "flock": "flock.com",
    "gchat": "chat.googleapis.com",
    "gotifys": "",
    "jsons": "",
    "mmosts": "",
    "nctalks": "",
    "ntfys": "",
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

# What calls everybody in a room, or in Discord's form somebody. It may stand in the name of a queue, and isn't meant
# there. Also within a mail address at such a host: services differ in where they see a call, and it reads the same.
MENTION = re.compile(r"@(?=(?:everyone|channel|here|all|room)\b)|(?<=<)@", re.IGNORECASE)

# What apprise takes behind the question mark and must not be had: files of this machine, certificates that nobody
# verifies, redirects, other waits than ours.
REFUSED_OPTIONS = {"attach", "cto", "redirect", "retry", "rto", "store", "template", "verify", "wait"}

# At some levels apprise logs whole addresses. What became of a message is told by ``ChannelFailed``.
logging.getLogger("apprise").addFilter(lambda record: False)


class BadChannel(ValueError):
    """The address can't be a channel's; the text says why, without the address."""


class ChannelFailed(Exception):
    """A message did not arrive; the text says why and what can be done, without the address."""


def create_channel(owner: Owner, name: str, url: str) -> Channel:
    """Make a channel of this owner's, and return it. Nothing is sent to it.

    ``url`` is an https:// address, or one of apprise's for a service that is listed in ``SERVICES``.

    Raises:
        accounts.vouching.NotVouched: the owner may not use anything yet.
        BadChannel: the address can't be used.
        ValidationError: the name can't be used (its key is ``name``), or the owner has as many as one may have.
    """
    vouching.require_vouched(owner)
    name = name.strip()
    try:
        check_line(name, MAX_NAME_LENGTH)
    except ValidationError as error:
        why = f"A name has 1 to {MAX_NAME_LENGTH} characters, all of which can be seen."
        raise ValidationError({"name": why}) from error
    sender = _sender(url.strip())
    sealed = sealing.seal(sealing.CHANNELS, url.strip())
    try:
        with transaction.atomic():
            Owner.objects.select_for_update().get(id=owner.id)
            if owner.channels.count() >= MAX_CHANNELS:
                raise ValidationError(f"You have {MAX_CHANNELS} channels, which is the most; delete one first.")
            return Channel.objects.create(owner=owner, name=name, service=sender.shown(), sealed_url=sealed)
    except IntegrityError as error:
        raise ValidationError({"name": "You have a channel of this name; choose another one."}) from error


def delete_channel(channel: Channel) -> None:
    """Remove a channel. What waits for it is not sent any more."""
    channel.delete()


def test_channel(channel: Channel) -> None:
    """Send a test message now, and note whether it arrived. An owner sends one at a time.

    Raises:
        accounts.vouching.NotVouched: the owner may not use anything any more.
        ChannelFailed: it did not, or another one of the owner's is on its way.
    """
    vouching.require_vouched(channel.owner)
    body = f"Messages about your queues arrive here.\n{settings.GUARDIAN_BASE_URL}"
    key = f"channel-test:{channel.owner_id}"
    if not limits.add(key, True, TEST_LOCK_SECONDS):
        raise ChannelFailed("a test is on its way; wait for it")
    try:
        send(channel, "This is a test from Guardian", body)
    finally:
        cache.delete(key)


def send(channel: Channel, title: str, body: str) -> None:
    """Send a message now, and note whether it arrived. It takes 12 seconds at most.

    Raises:
        ChannelFailed: it did not arrive.
    """
    try:
        post(channel, title, body)
    except ChannelFailed as error:
        record_result(channel, str(error))
        raise
    record_result(channel)


def post(channel: Channel, title: str, body: str) -> None:
    """Send a message now, without touching the database. The body is shortened where the service needs it.

    Raises:
        ChannelFailed: it did not arrive.
    """
    try:
        sender = _sender(sealing.unseal(sealing.CHANNELS, channel.sealed_url))
    except sealing.CannotUnseal as error:
        raise ChannelFailed(
            "its address can't be read any more, since Guardian's SECRET_KEY was changed; delete it and enter it anew"
        ) from error
    except BadChannel as error:
        raise ChannelFailed(str(error).rstrip(".")) from error
    if sender.service != WEBHOOK:
        title, body = (MENTION.sub("@\N{ZERO WIDTH SPACE}", text) for text in (title, body))
    public_https.confine(sender.plugin)
    arrived, attempt = public_https.run_with_deadline(
        lambda: sender.plugin.notify(body, title, body_format=NotifyFormat.TEXT, overflow=OverflowMode.TRUNCATE)
    )
    if not arrived or attempt.status is None:
        raise ChannelFailed(_why(attempt))


def record_result(channel: Channel, error: str = "") -> None:
    """Write down that a message arrived, or why it did not."""
    news: dict[str, Any] = {"last_error": error[:300]} if error else {"last_error": "", "last_sent_at": timezone.now()}
    Channel.objects.filter(id=channel.id).update(**news)
    for name, value in news.items():
        setattr(channel, name, value)


class _Sender(NamedTuple):
    plugin: NotifyBase
    service: str
    host: str

    def shown(self) -> str:
        """Return what is shown of a channel: the name of the service, and the host without what is secret around it."""
        return f"{self.service} at {self.host}"[:100]


def _sender(url: str) -> _Sender:
    """Return what sends to this address.

    Raises:
        BadChannel: there is none, or it isn't to be used.
    """
    if len(url) > MAX_URL_LENGTH or any(character.isspace() or not character.isprintable() for character in url):
        raise BadChannel(f"An address has {MAX_URL_LENGTH} characters at most, and no spaces in it.")
    scheme = url.partition("://")[0].lower()
    if scheme == "http":
        raise BadChannel("Messages go over https:// only; enter an address that begins so.")
    facts: dict[str, Any] | None = url_to_dict(url) if scheme == "https" or scheme in SERVICES else None  # type: ignore[no-untyped-call]
    if facts is not None and facts["schema"] in SERVICES:
        sender = _of_service(facts)
    elif scheme == "https":
        sender = _of_webhook(url)
    elif scheme in SERVICES:
        raise BadChannel(f"This is no complete {scheme}:// address; see that all of it was copied.")
    else:
        raise BadChannel(
            "Enter the https:// address that the service gave you for incoming messages (a webhook), "
            f"or one of apprise's that begins with {', '.join(f'{name}://' for name in SERVICES)}."
        )
    try:
        public_https.require_public_literal(sender.host)
    except public_https.Unreachable as error:
        raise BadChannel(f"The address can't be used: {error}.") from error
    return sender


def _of_service(facts: dict[str, Any]) -> _Sender:
    refused = sorted(REFUSED_OPTIONS & set(facts["qsd"]))
    if refused:
        raise BadChannel(f"The option '{refused[0]}' can't be used here; take it out of the address.")
    schema = facts["schema"]
    plugin = Apprise.instantiate(facts, asset=_asset())
    if plugin is None:
        raise BadChannel("The service would not know this address; see that all of it was copied.")
    if str(getattr(plugin, "mode", "")) == "cloud":  # of ntfy's own, where a topic stands in the host's place
        return _Sender(plugin, str(plugin.service_name), "ntfy.sh")
    service = WEBHOOK if isinstance(plugin, NotifyJSON) else str(plugin.service_name)
    return _Sender(plugin, service, SERVICES[schema] or str(plugin.host))


def _of_webhook(url: str) -> _Sender:
    """Return the sender of any other https:// address: it gets a JSON object with a title and a message."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadChannel("This is no address; see that all of it was copied.") from error
    if not host or parts.fragment:
        raise BadChannel("This is no address of a webhook: it names no host, or has a '#' in it.")
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
    """Return how apprise is to send: as Guardian, without pictures of others, keeping nothing, following nobody."""
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
    """Return why a message did not arrive, and what can be done."""
    status = attempt.status
    if attempt.reason or status is None:
        return attempt.reason or "nothing was sent; see that the address is right"
    if status in (401, 403):
        return f"it answered {status}: the address isn't accepted any more; make a new one there and enter it here"
    if status in (404, 410):
        return f"it answered {status}: there is nothing at the address any more; make a new one there and enter it here"
    if 300 <= status < 400:
        return f"it answered {status}: a redirect, which isn't followed; enter the address that it leads to"
    if status == 429:
        return "it answered 429: it got too many messages; the next ones may arrive"
    if status >= 500:
        return f"it answered {status}: something is wrong there; see the service's own status page"
    if status >= 400:
        return f"it answered {status}: it does not take this message; see that the address is one for messages"
    return f"it answered {status}, and that it did not take the message"
