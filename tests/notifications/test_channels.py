"""Channels: which URLs are accepted, where messages may go, and that secrets stay secret. Over real HTTPS."""

import ast
import gzip
import logging
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from apprise.manager_plugins import NotificationManager
from apprise.plugins import custom_json
from apprise.plugins.telegram import NotifyTelegram
from django.core.exceptions import ValidationError
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from accounts.access.vouching import NotVouched
from accounts.models import Owner
from core import bounded_requests
from notifications import channels, public_https
from notifications.channels import BadChannel, ChannelFailed, create_channel
from notifications.models import Channel
from tests.support.webhooks import Webhook, trickle

pytestmark = pytest.mark.django_db

SLACK = "https://hooks.slack.com/services/T12345678/B12345678/abcdefghijklmnopqrstuvwx"


@pytest.fixture
def channel(alice, private_channels, webhook):
    return create_channel(alice, "room", webhook.url())


def failure(channel):
    with pytest.raises(ChannelFailed) as caught:
        channels.send(channel, "title", "body")
    assert "s3cr3t" not in str(caught.value)
    channel.refresh_from_db()
    assert channel.last_error == str(caught.value)[:300]
    return str(caught.value)


# Accepted URLs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SLACK, "Slack at slack.com"),
        ("https://discord.com/api/webhooks/123456789012345678/abcdefgABCDEFG_-123", "Discord at discord.com"),
        ("https://chat.googleapis.com/v1/spaces/AAA/messages?key=abc&token=def", "Google Chat at chat.googleapis.com"),
        ("https://ntfy.sh/our-secret-topic", "ntfy at ntfy.sh"),
        ("ntfys://ntfy.example.org/topic", "ntfy at ntfy.example.org"),
        ("gotifys://push.example.org/AbCdEf123456789", "Gotify at push.example.org"),
        ("mmosts://chat.example.org/abcdefghijklmnopqrstuvwxyz", "Mattermost at chat.example.org"),
        ("https://example.org/hook/s3cr3t?token=s3cr3t", "Webhook at example.org"),
        ("https://me:s3cr3t@example.org:8443/", "Webhook at example.org"),
        ("jsons://me:s3cr3t@example.org/hook", "Webhook at example.org"),
        ("https://[2001:4860:4860::8888]/hook", "Webhook at 2001:4860:4860::8888"),
    ],
)
def test_a_url_is_shown_as_its_service_and_host_only(alice, url, shown):
    channel = create_channel(alice, "room", f"  {url} ")
    assert channel.service == shown
    stored = str(Channel.objects.values().get())
    assert url not in stored
    assert "s3cr3t" not in stored


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.org/hook", "over HTTPS only"),
        ("json://example.org/hook", "Enter the https:// address"),
        ("exec://touch", "Enter the https:// address"),
        ("file:///etc/passwd", "Enter the https:// address"),
        ("", "Enter the https:// address"),
        ("slack://", "slack:// address is incomplete|does not recognize this address"),
        ("https://", "has no host"),
        ("https://[::1", "is invalid"),
        ("https://example.org:99999/", "is invalid"),
        ("https://exam ple.org/", "no spaces"),
        ("https://example.org/\r\nX: y", "no spaces"),
        ("https://example.org/\u202egro", "no spaces"),
        ("https://example.org/" + "x" * 2000, "2000 characters"),
        (SLACK + "?template=/etc/passwd", "option 'template'"),
        ("jsons://example.org/hook?verify=no", "option 'verify'"),
        ("jsons://example.org/hook?redirect=yes", "option 'redirect'"),
        ("ntfys://example.org/topic?attach=/etc/passwd", "option 'attach'"),
    ],
)
def test_a_url_that_is_not_https_is_refused_with_the_reason(alice, url, why):
    with pytest.raises(BadChannel, match=why):
        create_channel(alice, "room", url)
    assert not Channel.objects.exists()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0", "0.0.0.0",
        "localhost", "LOCALHOST.", "guardian.localhost", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
        "10.0.0.7", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.1.1", "240.0.0.1",
        "255.255.255.255", "[fe80::1]", "[fc00::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
        "[::7f00:1]", "[fec0::1]", "[64:ff9b:1::7f00:1]", "[2001:db8::1]", "[100::1]",
    ],
)  # fmt: skip
def test_a_private_address_is_refused_in_every_notation(alice, host):
    with pytest.raises(BadChannel, match="private address"):
        create_channel(alice, "room", f"https://{host}/hook")
    with pytest.raises(BadChannel, match=r"private address|incomplete"):
        create_channel(alice, "room", f"jsons://{host}/hook")


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_an_internet_address_is_public(address):
    assert public_https.is_public(address)


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(), st.text().map("https://{}".format), st.text().map("slack://{}".format)))
def test_any_text_makes_a_sender_or_is_refused(text):
    with suppress(BadChannel):
        assert channels._sender(text).host


@pytest.mark.parametrize("name", ["", "   ", "x" * 101, "a\nb", "a\0b", "a\u202eb", "\u3164"])
def test_a_name_has_1_to_100_visible_characters(alice, name):
    with pytest.raises(ValidationError, match="visible characters"):
        create_channel(alice, name, SLACK)


def test_channel_names_are_unique_for_an_owner(alice):
    create_channel(alice, "room", SLACK)
    with pytest.raises(ValidationError, match="a channel of this name"):
        create_channel(alice, " room ", SLACK)
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    assert create_channel(bob, "room", SLACK).owner == bob


def test_an_owner_without_access_sends_nothing_to_channels(channel, webhook):
    Owner.objects.update(vouched=False)
    channel.owner.refresh_from_db()
    with pytest.raises(NotVouched):
        channels.test_channel(channel)
    with pytest.raises(NotVouched):
        create_channel(channel.owner, "another", SLACK)
    assert webhook.connections == 0


# Sending


def test_a_test_message_arrives_and_is_recorded(channel, webhook):
    channels.test_channel(channel)
    (request,) = webhook.received
    assert request.path == "/hooks/s3cr3t"
    assert request.json["title"] == "This is a test from Guardian"
    assert "about your queues" in request.json["message"]
    channel.refresh_from_db()
    assert channel.last_sent_at is not None
    assert channel.last_error == ""


def test_an_owner_sends_one_test_at_a_time(channel, webhook, private_channels):
    bob = Owner.objects.create_user("bob@example.org", vouched=True)
    other = create_channel(channel.owner, "another", webhook.url())
    of_bob = create_channel(bob, "room", webhook.url("/bob"))
    begun = []
    post = channels.post

    def post_while_others_try(one, *message):
        if not begun:
            begun.append(one)
            for another in (channel, other):
                with pytest.raises(ChannelFailed, match="another test is running"):
                    channels.test_channel(another)
            channels.test_channel(of_bob)
        post(one, *message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "post", post_while_others_try)
        channels.test_channel(channel)
    assert [request.path for request in webhook.received] == ["/bob", "/hooks/s3cr3t"]
    webhook.status = 503
    for _ in range(2):
        with pytest.raises(ChannelFailed, match="503"):
            channels.test_channel(channel)


def test_a_url_is_requested_as_it_was_entered_and_its_credentials_are_basic_auth(alice, private_channels, webhook):
    url = webhook.url("/a%2Fb/c?token=x%26y&token=z&empty=").replace("https://", "https://me:p%40ss@")
    channels.send(create_channel(alice, "room", url), "title", "body")
    (request,) = webhook.received
    assert request.path == "/a%2Fb/c?token=x%26y&token=z&empty="
    assert request.headers["Authorization"] == "Basic bWU6cEBzcw=="


def test_a_long_message_is_shortened_for_the_service_and_markup_stays_text(channel, webhook):
    channels.send(channel, "<b>&amp;" + "t" * 1000, "<script>*_`&lt;" + "b" * 100_000)
    (request,) = webhook.received
    assert len(request.json["title"]) <= 250
    assert 1000 < len(request.json["message"]) <= 32768
    assert request.json["message"].startswith("<script>*_`&lt;b")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("@all, x@all.org and bob@example.org", "@|all, x@|all.org and bob@example.org"),
        ("queue/@alice (@bob)", "queue/@|alice (@|bob)"),
        ("<@U123> <@&99> <users/all> <!channel> < 5", "<|@|U123> <|@&99> <|users/all> <|!channel> < 5"),
        ("[open](https://x.example) ![i][1] [1]", "[open]|(https://x.example) ![i]|[1] [1]"),
        ("<https://x.example|open>", "<|https://x.example|open>"),
    ],
)
def test_markup_in_a_name_is_disabled(alice, private_channels, webhook, name, sent):
    url = f"mmosts://localhost:{webhook.port}/abcdefghijklmnopqrstuvwxyz"
    channels.send(create_channel(alice, "room", url), name, "body")
    assert webhook.received[0].json["text"].replace("\u200b", "|") == f"{sent}\r\nbody"


def test_a_name_is_no_html_on_telegram(alice, private_channels, webhook, monkeypatch):
    monkeypatch.setattr(NotifyTelegram, "notify_url", webhook.url("/bot"))
    webhook.body = b'{"ok": true}'
    channel = create_channel(alice, "room", "tgram://123456789:abcdefghijklmnopqrstuvwxyz/12345678")
    channels.send(channel, "<b>q</b>", "queue/<a href='https://x.example'>open</a> &lt;\nnext")
    text = webhook.received[0].json["text"].replace("\u200b", "")
    assert (
        text == "<b>&lt;b&gt;q&lt;/b&gt;</b>\r\nqueue/&lt;a href='https://x.example'&gt;open&lt;/a&gt; &amp;lt;\r\nnext"
    )


@pytest.mark.parametrize(
    ("status", "what"),
    [(400, "does not accept this message"), (401, "create a new"), (403, "create a new"), (404, "create a new"),
     (410, "create a new"), (429, "too many messages"), (500, "the service failed"), (503, "status page")],
)  # fmt: skip
def test_an_error_of_the_service_is_reported_with_a_remedy(channel, webhook, status, what):
    webhook.status = status
    assert f"it answered {status}" in failure(channel)
    assert what in channel.last_error
    webhook.status = 200
    channels.send(channel, "title", "body")
    channel.refresh_from_db()
    assert channel.last_error == ""


def test_an_unknown_host_is_reported(alice):
    channel = create_channel(alice, "room", "https://no-such-host.invalid/s3cr3t")
    assert failure(channel).startswith("no server was reached at 'no-such-host.invalid'; check its spelling")


def unknown_name(_):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def slow_name_server(_):
    time.sleep(5)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def at(address):
    return lambda port: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


@pytest.fixture
def resolve(monkeypatch):
    """Return a function that makes the name ``inside.example.org`` resolve in a way that this machine can't offer."""
    real = socket.getaddrinfo

    def replace(resolve):
        def getaddrinfo(host, port, *args, flags=0, **kwargs):
            if host == "inside.example.org" and not flags & socket.AI_NUMERICHOST:
                return resolve(port)
            return real(host, port, *args, flags=flags, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return replace


@pytest.mark.parametrize(
    ("resolved", "counts_as_public"),
    [
        (unknown_name, False),
        (slow_name_server, False),
        (at("127.0.0.1"), False),
        (at("127.0.0.77"), True),
        (at("198.51.100.1"), True),
    ],
    ids=["unknown", "the name server hangs", "private", "the connection is refused", "nobody answers"],
)
def test_a_test_does_not_tell_how_a_name_of_the_network_fails(
    alice, webhook, short_timeouts, monkeypatch, resolve, resolved, counts_as_public
):
    resolve(resolved)
    if counts_as_public:
        monkeypatch.setattr(public_https, "is_public", lambda _: True)
    channel = create_channel(alice, "room", webhook.url(host="inside.example.org"))
    reason = (
        "no server was reached at 'inside.example.org'; check its spelling, and that it answers at a public address"
    )
    assert failure(channel) == reason
    assert webhook.connections == 0


def test_a_self_signed_certificate_is_not_trusted(channel, webhook, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "certificate can't be verified" in failure(channel)
    assert webhook.received == []


def test_a_certificate_for_another_host_is_not_trusted(alice, private_channels, certificate):
    with Webhook(certificate, "127.0.0.2") as other:
        assert "certificate can't be verified" in failure(create_channel(alice, "room", other.url(host="127.0.0.2")))
        assert other.received == []


def test_a_server_without_tls_gets_no_message(alice, private_channels):
    with Webhook(None) as plain:
        channel = create_channel(alice, "room", plain.url())
        assert "isn't HTTPS" in failure(channel) or "certificate can't be verified" in channel.last_error
        assert plain.received == []


# Where messages may not go


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_saved_url_that_is_no_longer_allowed_is_not_connected_to(
    alice, private_channels, settings, certificate, host
):
    with Webhook(certificate, "::1" if "::" in host else "127.0.0.1") as hook:
        channel = create_channel(alice, "room", hook.url(host=host))
        channels.send(channel, "title", "body")
        assert len(hook.received) == 1
        settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE = False
        before = hook.connections
        assert "private address" in failure(channel)
        assert hook.connections == before


@pytest.mark.parametrize("status", [301, 302, 307])
@pytest.mark.parametrize("to", ["http", "https"])
def test_a_redirect_is_not_followed(channel, webhook, certificate, status, to):
    with Webhook(certificate if to == "https" else None) as elsewhere:
        webhook.status, webhook.headers = status, {"Location": f"{to}://localhost:{elsewhere.port}/elsewhere"}
        assert "a redirect, which is not followed" in failure(channel)
        assert elsewhere.connections == 0


def test_a_request_that_follows_redirects_never_reaches_plain_http(settings, private_channels, webhook, certificate):
    with Webhook(None) as plain:
        webhook.status, webhook.headers = 307, {"Location": f"http://localhost:{plain.port}/elsewhere"}
        url = webhook.url()
        arrived, attempt = public_https.run_with_deadline(
            lambda: public_https.client.post(url, data="{}", timeout=5).ok
        )
        assert not arrived
        assert "plain http://" in attempt.reason
        assert plain.connections == 0


def test_certificates_are_verified_even_if_a_plugin_disables_it(settings, webhook):
    settings.GUARDIAN_CHANNELS_MAY_BE_PRIVATE = True
    url = webhook.url()
    arrived, attempt = public_https.run_with_deadline(
        lambda: public_https.client.post(url, data="{}", verify=False, timeout=5).ok
    )
    assert not arrived
    assert "certificate" in attempt.reason


def test_a_proxy_from_the_environment_is_not_used(channel, webhook, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    channels.send(channel, "title", "body")
    assert len(webhook.received) == 1


def test_credentials_for_the_host_in_a_netrc_file_are_not_sent(channel, webhook, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine localhost login guardian password s3cr3t")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    channels.send(channel, "title", "body")
    assert "Authorization" not in webhook.received[0].headers


@pytest.mark.parametrize("schema", channels.SERVICES)
def test_each_service_sends_only_through_the_confined_client(schema):
    plugin = NotificationManager()[schema]
    module = sys.modules[plugin.__module__]
    assert [cls.__module__ for cls in plugin.__mro__[1:]] == ["apprise.plugins.base", "apprise.url", "builtins"]
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & {"requests", "urllib.request", "http.client", "httpx", "aiohttp", "socket", "urllib3"} == {
        "requests"
    }
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "requests"]
    used = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "requests"
    ]
    assert len(used) == len(names)
    assert all(hasattr(public_https.client, name) for name in used)


def test_a_plugin_that_sends_otherwise_is_not_used(channel, webhook, monkeypatch):
    monkeypatch.delattr(custom_json, "requests")
    with pytest.raises(KeyError):
        channels.send(channel, "title", "body")
    assert webhook.connections == 0


def test_other_requests_of_the_process_are_not_confined(channel, webhook, certificate):
    # Such as sign-in by OpenID Connect, whose provider may have a private address.
    channels.send(channel, "title", "body")
    assert requests.Session.get_adapter.__module__ == "requests.sessions"
    assert requests.post(webhook.url(), data="{}", verify=str(certificate), timeout=5).ok
    with Webhook(None) as plain:
        assert requests.post(f"http://127.0.0.1:{plain.port}/", data="{}", timeout=5).ok


# Timeouts and sizes


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr(bounded_requests, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(bounded_requests, "SECONDS", 1.5)


@pytest.mark.parametrize("how", ["silent", "trickling"])
def test_a_service_that_does_not_respond_in_time_is_abandoned(channel, webhook, short_timeouts, how):
    webhook.slowly = trickle if how == "trickling" else lambda write: time.sleep(20)
    began = time.monotonic()
    assert "answer came within" in failure(channel)
    assert time.monotonic() - began < 6  # the server would take 20


def test_a_compressed_bomb_as_an_answer_does_no_harm(channel, webhook):
    webhook.body = gzip.compress(b"0" * 50_000_000)
    webhook.headers = {"Content-Encoding": "gzip"}
    began = time.monotonic()
    channels.send(channel, "title", "body")
    assert time.monotonic() - began < 8


# Secrets


def test_no_secret_of_a_url_is_logged_at_any_level(channel, webhook, caplog, capfd):
    caplog.set_level(1)
    logging.getLogger("apprise").setLevel(1)
    logging.getLogger("urllib3").setLevel(1)
    channels.send(channel, "title", "body")
    webhook.status = 404
    failure(channel)
    webhook.headers = {"Location": webhook.url("/other-s3cr3t")}
    webhook.status = 302
    failure(channel)
    with pytest.raises(BadChannel):
        create_channel(channel.owner, "x", "slack://s3cr3t")
    with pytest.raises(BadChannel):
        create_channel(channel.owner, "x", "jsons://me:s3cr3t@example.org/s3cr3t?verify=no")
    out = capfd.readouterr()
    assert "s3cr3t" not in caplog.text + out.out + out.err
    logging.getLogger("apprise").setLevel(logging.NOTSET)
    logging.getLogger("urllib3").setLevel(logging.NOTSET)


def test_a_url_sealed_with_another_key_is_reported(channel, webhook, settings):
    settings.SECRET_KEY = "another"
    assert "another key now, so it can't read the address; delete the channel and add it again" in failure(channel)
    settings.SECRET_KEY_FALLBACKS = ["for-the-tests-alone"]
    channels.send(channel, "title", "body")
    assert len(webhook.received) == 1


def test_sealing_the_same_url_twice_gives_different_texts(alice):
    one, other = create_channel(alice, "one", SLACK), create_channel(alice, "other", SLACK)
    assert one.sealed_url != other.sealed_url
