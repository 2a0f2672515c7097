import itertools
import logging
import secrets
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlsplit

import pika
import pytest
from django.conf import settings as django_settings

from core import broker
from rabbit import http
from rabbit.entities import Connection, Exchange, RateSample, User, Vhost
from rabbit.errors import BrokerError, BrokerUnavailable, InequivalentArguments, MalformedResponse, NotOnBroker, Refused
from rabbit.management import Management
from rabbit.permissions import FULL_ACCESS, NO_ACCESS
from tests.support.proxy import http_answer
from tests.support.toolbox import can_log_in, queue_names, wait_until

pytestmark = pytest.mark.rabbitmq

TOTALS = {"disable_stats": "true", "enable_queue_totals": "true"}
HTML = b"<html><body>Welcome to the hotel's network</body></html>"

STRANGE = ["a/b", "a'b\"c", "100%", "%2F", "?x=1#y", "zoé \N{SNOWMAN}", "<b>&", "a b+c", "\t\x01", "...", "a\\b", "~"]


@contextmanager
def client(url, **options):
    management = Management(url, **options)
    try:
        yield management
    finally:
        management.close()


@pytest.fixture
def proxied(broker, proxy):
    """Give a client that connects through the proxy."""
    with client(proxy.url(broker.management_url), read_timeout=0.5) as management:
        yield management


@pytest.fixture
def user(management):
    name = f"user-{secrets.token_hex(8)}"
    management.put_user(name, "a password")
    yield name
    if name in {user.name for user in management.users()}:
        management.delete_user(name)


def connect(broker, vhost, user=None, password=None):
    parts = urlsplit(broker.amqp_url)
    credentials = parts.netloc.rpartition("@")[0] if user is None else f"{user}:{quote(password)}"
    address = parts.netloc.rpartition("@")[2]
    return pika.BlockingConnection(pika.URLParameters(f"amqp://{credentials}@{address}/{quote(vhost, safe='')}"))


def test_a_cluster_has_an_id_unless_the_broker_does_not_tell_it(management, proxied, proxy):
    assert management.cluster_id() == management.cluster_id() != ""
    proxy.answer(http_answer("401 Unauthorized"))
    assert proxied.cluster_id() == ""


def test_the_clock_of_the_broker_is_read_from_the_date_header(proxied, proxy):
    assert abs(datetime.now(UTC) - proxied.clock()) < timedelta(seconds=60)
    proxy.answer(http_answer("401 Unauthorized", b"", "Date: Thu, 01 Feb 2024 03:04:05 GMT"))
    assert proxied.clock() == datetime(2024, 2, 1, 3, 4, 5, tzinfo=UTC)
    for headers in ([], ["Date: yesterday"]):
        proxy.answer(http_answer("200 OK", b"{}", *headers))
        assert proxied.clock() is None


def test_a_stopped_node_has_unknown_figures_and_no_alarm(proxied, proxy):
    proxy.answer(http_answer("200 OK", b'[{"name": "rabbit@b", "running": false}]'))
    assert proxied.nodes() == [("rabbit@b", False, None, None, False, None, None, False, None, None, None, ())]


def test_a_503_with_alarms_is_not_an_outage(proxied, proxy):
    body = b'{"alarms":[{"node":"a@b","resource":"memory"}],"reason":"There are alarms","status":"failed"}'
    proxy.answer(http_answer("503 Service Unavailable", body))
    assert proxied.alarms() == ["memory on a@b"]


@pytest.mark.parametrize("body", [b"", HTML, b"[]", b"{}", b'{"alarms": 1}', b'{"alarms": ["memory"]}'])
def test_a_503_without_alarms_is_an_outage(proxied, proxy, body):
    proxy.answer(http_answer("503 Service Unavailable", body))
    with pytest.raises(BrokerUnavailable, match="503"):
        proxied.alarms()


def test_a_vhost_is_created_once_listed_and_deleted(management):
    name = f"a/b%é {secrets.token_hex(8)}"
    try:
        assert management.create_vhost(name) is True
        user = management.whoami().name
        management.set_permissions(name, user, NO_ACCESS)  # as if the first request had been cut off
        assert management.create_vhost(name) is False
        assert management.permissions_of(user)[name] == FULL_ACCESS
        nodes = frozenset(node.name for node in management.nodes())
        assert Vhost(name, nodes) in management.vhosts()
    finally:
        management.delete_vhost(name)
    assert name not in {vhost.name for vhost in management.vhosts()}
    with pytest.raises(NotOnBroker):
        management.delete_vhost(name)


def test_the_nodes_of_a_vhost_are_those_on_which_it_runs(proxied, proxy):
    body = (
        b'[{"name": "a", "cluster_state": {"x@1": "running", "x@2": "stopped"}}, {"name": "b", "cluster_state": {}},'
        b' {"name": "c", "cluster_state": []}]'  # of a node of RabbitMQ 4.x that has just started
    )
    proxy.answer(http_answer("200 OK", body))
    assert proxied.vhosts() == [Vhost("a", frozenset({"x@1"})), Vhost("b", frozenset()), Vhost("c", frozenset())]


@pytest.mark.parametrize("name", STRANGE)
def test_a_queue_name_with_special_characters_survives_a_round_trip(management, vhost, name):
    assert [management.declare_queue(vhost, name) for _ in range(2)] == [True, False]
    assert management.queue(vhost, name)["name"] == name
    assert queue_names(management, vhost) == {name}
    management.purge_queue(vhost, name)
    management.delete_queue(vhost, name)
    assert queue_names(management, vhost) == set()


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_dot_segment_as_a_name_is_not_sent(proxied, proxy, management, vhost, name):
    for ask in (proxied.declare_queue, proxied.queue):
        with pytest.raises(Refused, match=f"'{name}'"):
            ask(vhost, name)
    with pytest.raises(Refused):
        proxied.queue(name, "vhosts")
    assert proxy.connections == 0
    assert queue_names(management, vhost) == set()


@pytest.mark.parametrize("name", ["a\n", "\r", "a\nb"])
def test_a_name_with_a_line_break_is_refused(management, vhost, name):
    with pytest.raises(Refused, match="line break"):
        management.declare_queue(vhost, name)
    assert queue_names(management, vhost) == set()


def test_an_invalid_argument_is_refused_with_the_brokers_reason(management, vhost):
    with pytest.raises(Refused, match="x-message-ttl") as refusal:
        management.declare_queue(vhost, "q", {"x-message-ttl": "soon"})
    assert type(refusal.value) is Refused
    assert refusal.value.status == 400


@pytest.mark.parametrize("length", [256, 5_000, 100_000])
def test_a_name_that_is_too_long_is_refused(management, vhost, length):
    with pytest.raises(Refused):
        management.declare_queue(vhost, "a" * length)


def test_missing_objects_raise_not_on_broker(management, vhost):
    nowhere = f"no such vhost {secrets.token_hex(8)}"
    nobody = f"nobody-{secrets.token_hex(8)}"
    for ask in (
        lambda: management.queue(vhost, "none"),
        lambda: management.declare_queue(nowhere, "q"),
        lambda: management.list_queues(nowhere, TOTALS),
        lambda: management.bindings(nowhere),
        lambda: management.exchanges(nowhere),
        lambda: management.user(nobody),
        lambda: management.delete_user(nobody),
        lambda: management.permissions_of(nobody),
        lambda: management.set_permissions(vhost, nobody, NO_ACCESS),
    ):
        with pytest.raises(NotOnBroker):
            ask()


@pytest.mark.parametrize("name", ["a", "it's", "é", "zoé \N{SNOWMAN}"])
def test_a_queue_with_another_declaration_is_no_outage(management, vhost, name):
    # RabbitMQ 4 can't send a reason that is not ASCII, and answers with an empty 500.
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "\N{SNOWMAN}"}
    management.declare_queue(vhost, name, arguments)
    for other in (
        {"arguments": {}},
        {"arguments": arguments | {"x-dead-letter-routing-key": "a"}},
        {"auto_delete": True},
    ):
        with pytest.raises(InequivalentArguments):
            management.declare_queue(vhost, name, **{"arguments": arguments, **other})


def test_an_empty_500_to_every_request_is_an_outage(proxied, proxy):
    proxy.answer(http_answer("500 Internal Server Error"))
    with pytest.raises(BrokerUnavailable, match="500"):
        proxied.declare_queue("/", "é")


def test_exchanges_are_listed_with_those_of_the_broker(management, vhost):
    management.declare_exchange(vhost, "exchange/a/é", "fanout")
    exchanges = management.exchanges(vhost)
    assert Exchange("exchange/a/é", vhost, "fanout", True, False, False) in exchanges
    assert {"", "amq.topic"} < {exchange.name for exchange in exchanges}


def test_a_binding_is_listed_for_its_vhost_and_queue(management, vhost):
    management.declare_queue(vhost, "a/q")
    management.declare_exchange(vhost, "e/1")
    management.bind_queue(vhost, "e/1", "a/q", "key.#/é", {"x": 1})
    bound = ("e/1", vhost, "a/q", "queue", "key.#/é", {"x": 1})
    assert bound in management.queue_bindings(vhost, "a/q")
    assert bound in management.bindings(vhost)


@pytest.mark.parametrize("strange", ["a.b-c", "a/b", "é%2F", "new\nline", "'\"<"])
def test_a_user_is_created_changed_and_deleted(management, strange):
    name = f"{strange}{secrets.token_hex(8)}"
    try:
        assert management.put_user(name, "first", ["monitoring", "policymaker"]) is True
        assert management.user(name) == User(name, frozenset({"monitoring", "policymaker"}))
        assert management.put_user(name, "second") is False
        assert User(name, frozenset()) in management.users()
    finally:
        management.delete_user(name)
    assert name not in {user.name for user in management.users()}


def test_a_password_is_set_literally_and_replaced(broker, management, vhost, user):
    management.set_permissions(vhost, user, FULL_ACCESS)
    for password in ("pa:ss/wo%rd@#?", "zoé \N{SNOWMAN}"):
        management.put_user(user, password, ["administrator"])
        address = urlsplit(broker.management_url).netloc.rpartition("@")[2]
        with client(f"http://{user}:{quote(password, safe='')}@{address}") as theirs:
            assert theirs.whoami() == (user, {"administrator"})
    with client(f"http://{user}:first@{address}") as theirs, pytest.raises(Refused) as refusal:
        theirs.whoami()
    assert refusal.value.status == 401


def test_a_user_without_a_password_cannot_log_in(broker, management, vhost, user):
    management.set_permissions(vhost, user, FULL_ACCESS)
    assert can_log_in(broker, vhost, user, "a password")
    management.put_user(user, None)
    assert not any(can_log_in(broker, vhost, user, password) for password in ("a password", ""))


def test_permissions_are_set_read_and_deleted(management, vhost, user):
    assert management.permissions_of(user) == {}
    assert user not in management.all_permissions()
    management.set_permissions(vhost, user, NO_ACCESS)
    found = management.all_permissions()
    assert found[user] == {vhost: NO_ACCESS}
    assert found[management.whoami().name][vhost] == FULL_ACCESS
    management.set_permissions(vhost, user, NO_ACCESS._replace(read=r"^queue/a\.b/é"))
    assert management.permissions_of(user) == {vhost: ("^$", "^$", r"^queue/a\.b/é")}
    management.delete_permissions(vhost, user)
    assert management.permissions_of(user) == {}


def test_a_users_connections_are_listed_and_closed_with_the_reason(broker, management, vhost, user):
    management.set_permissions(vhost, user, NO_ACCESS)
    connection = connect(broker, vhost, user, "a password")
    wait_until(lambda: management.connections_of(user))
    [seen] = management.connections_of(user)
    assert isinstance(seen, Connection)
    assert seen.vhost == vhost
    assert seen.client_address
    assert seen.name.startswith(seen.client_address)
    management.close_connections_of(user, "the password\nwas replaced — é")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="the password was replaced"):
        connection.process_data_events(time_limit=10)
    wait_until(lambda: not management.connections_of(user))


def test_a_connection_has_the_address_of_its_client_and_the_time_it_was_opened(proxied, proxy):
    body = (
        b'[{"name": "1.2.3.4:5 -> 6:7", "vhost": "/", "peer_host": "host", "connected_at": 1700000000000},'
        b' {"name": "[::1]:5 -> [::1]:5672", "vhost": "/"}]'
    )
    proxy.answer(http_answer("200 OK", body))
    moment = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert proxied.connections_of("anybody") == [
        ("1.2.3.4:5 -> 6:7", "/", "host", moment),
        ("[::1]:5 -> [::1]:5672", "/", "[::1]", None),
    ]


def test_clients_are_listed_for_one_vhost_or_all(broker, management, vhost, user):
    management.set_permissions(vhost, user, NO_ACCESS)
    began = datetime.now(UTC) - timedelta(seconds=1)
    connection = connect(broker, vhost, user, "a password")
    wait_until(lambda: management.clients(vhost), seconds=10)
    [client] = management.clients(vhost)
    assert (client.user, client.vhost) == (user, vhost)
    assert (client.protocol, client.given_name) == ("AMQP 0-9-1", "")
    assert client.name == management.connections_of(user)[0].name
    assert began < client.connected_at < datetime.now(UTC)
    assert client in management.clients(None)
    connection.close()
    with pytest.raises(NotOnBroker):
        management.clients("no-such-vhost")


def test_a_half_open_connection_is_left_out(proxied, proxy):
    body = (
        b'[{"vhost": "v"}, {"user": "u"}, {"user": null, "vhost": "v"}, {"user": "u", "vhost": "v"},'
        b' {"user": "w", "vhost": "v", "protocol": "Web STOMP 1.2", "connected_at": 1700000000000, "name": "n",'
        b' "user_provided_name": "g"}]'
    )
    proxy.answer(http_answer("200 OK", body))
    moment = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert proxied.clients(None) == [("u", "v", "", None, "", ""), ("w", "v", "Web STOMP 1.2", moment, "n", "g")]
    proxy.answer(http_answer("200 OK", b'{"user": "u", "vhost": "v"}'))
    with pytest.raises(MalformedResponse, match="isn't a list"):
        proxied.clients(None)


def test_a_timeout_is_not_retried(proxied, proxy):
    proxy.delay(5)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"within 0\.5 s") as outage:
        proxied.overview()
    assert outage.value.timed_out
    assert time.monotonic() - began < 1.5
    assert proxy.requests == 1


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n[", b" "),
    ],
    ids=["headers", "interim responses", "body"],
)
def test_an_answer_that_never_ends_is_a_timeout(proxied, proxy, begins, goes_on):
    proxy.answer_slowly(itertools.chain([begins], itertools.repeat(goes_on, 100)), pause=0.1)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"complete within 1\.5 s") as outage:
        proxied.overview()
    assert outage.value.timed_out
    assert time.monotonic() - began < 3
    assert proxy.requests == 1


def test_a_response_over_the_limit_is_malformed(proxied, proxy, monkeypatch):
    monkeypatch.setattr(http, "MAX_BYTES", 1_000_000)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    proxy.answer_slowly(itertools.chain([head], itertools.repeat(b"2710\r\n" + b"x" * 10_000 + b"\r\n")), pause=0)
    with pytest.raises(MalformedResponse, match="more than 1000000 bytes"):
        proxied.list_queues(None, TOTALS)


@pytest.mark.parametrize("reset", [False, True])
def test_a_dropped_connection_is_reopened_once(proxied, proxy, vhost, reset):
    proxy.close_next(1, reset=reset)
    assert proxied.whoami().name
    assert proxy.connections == 2
    proxy.close_next(1, reset=reset)
    assert proxied.declare_queue(vhost, "q") is True
    proxy.close_next(1, reset=reset)
    proxied.delete_vhost(vhost)
    assert vhost not in {there.name for there in proxied.vhosts()}
    proxied.create_vhost(vhost)


def test_a_request_on_a_dropped_connection_may_have_reached_the_broker(proxied, proxy):
    proxied.whoami()
    proxy.refuse()
    proxy.close_next(1)
    with pytest.raises(BrokerUnavailable, match="connect") as outage:
        proxied.delete_user("u")
    assert not outage.value.never_reached


def test_without_a_valid_url_the_broker_is_unavailable(monkeypatch):
    for url in ("", "nonsense"):
        monkeypatch.setattr(django_settings, "RABBITMQ_MANAGEMENT_URL", url)
        with pytest.raises(BrokerUnavailable, match="RABBITMQ_MANAGEMENT_URL") as outage:
            broker.management()
        assert outage.value.never_reached


def test_each_dropped_pooled_connection_costs_one_retry(broker, proxy):
    with client(proxy.url(broker.management_url)) as proxied, ThreadPoolExecutor(4) as threads:
        together = threading.Barrier(4, timeout=10)

        def ask(_):
            together.wait()
            return proxied.whoami().name

        proxy.delay(0.2)  # each thread needs its own connection
        assert len(list(threads.map(ask, range(4)))) == 4
        proxy.forward()
        proxy.close_open()
        assert proxy.connections == 4
        assert proxied.whoami().name  # the retry uses none of the other three
        assert proxy.connections == 5
        assert len(list(threads.map(ask, range(4)))) == 4


def test_a_404_to_a_retried_deletion_counts_as_deleted(proxied, proxy, management):
    name = f"user-{uuid.uuid4().hex}"
    management.put_user(name, None)
    proxy.cut_after(0)
    proxied.delete_user(name)
    assert proxy.requests == 3  # the third checks whether the broker is shutting down
    assert name not in {user.name for user in management.users()}
    with pytest.raises(NotOnBroker):
        proxied.delete_user(name)


def test_every_response_of_another_shape_is_malformed(proxied, proxy):
    asks = [
        proxied.overview,
        proxied.whoami,
        proxied.vhosts,
        lambda: proxied.list_queues(None, TOTALS),
        proxied.users,
        proxied.nodes,
        proxied.alarms,
        lambda: proxied.queue("/", "q"),
        lambda: proxied.bindings("/"),
        lambda: proxied.queue_bindings("/", "q"),
        lambda: proxied.exchanges("/"),
        lambda: proxied.user("u"),
        lambda: proxied.permissions_of("u"),
        lambda: proxied.all_permissions(),
        lambda: proxied.connections_of("u"),
        lambda: proxied.declare_queue("/", "q"),
        lambda: proxied.delete_user("u"),
        lambda: proxied.put_user("u", None),
    ]
    for body, ask in itertools.product([HTML, b"7", b'[{"a": 1}]', b'{"a": 1}'], asks):
        proxy.answer(http_answer("200 OK", body))
        with pytest.raises(MalformedResponse, match="/api/"):
            ask()


def test_a_404_of_another_server_is_not_a_missing_queue(proxied, proxy):
    proxy.answer(http_answer("404 Not Found", HTML))
    for ask in (proxied.queue, proxied.declare_queue, proxied.queue_bindings):
        with pytest.raises(MalformedResponse, match="404"):
            ask("/", "q")


def test_a_404_to_everything_means_that_the_broker_is_shutting_down(proxied, proxy):
    proxy.answer(http_answer("404 Not Found", b'{"error":"Object Not Found","reason":"Not Found"}'))
    for ask in (proxied.queue, proxied.declare_queue, proxied.queue_bindings):
        with pytest.raises(BrokerUnavailable, match="shutting down") as outage:
            ask("/", "q")
        assert not outage.value.never_reached


def test_a_redirect_is_reported_and_not_followed(proxied, proxy):
    proxy.answer(http_answer("301 Moved Permanently", b"", "Location: https://me:secret@example.org/login"))
    with pytest.raises(MalformedResponse, match="redirect") as malformed:
        proxied.overview()
    assert "https://example.org/login" in str(malformed.value)
    assert "secret" not in str(malformed.value)
    assert proxy.requests == 1


@pytest.mark.parametrize("status", ["500 Internal Server Error", "502 Bad Gateway", "503 Service Unavailable"])
def test_a_server_error_is_an_outage(proxied, proxy, status):
    for body in (HTML, b'{"error": "Internal", "reason": ["a", 1]}'):
        proxy.answer(http_answer(status, body))
        with pytest.raises(BrokerUnavailable, match=status[:3]):
            proxied.list_queues(None, TOTALS)


def test_a_compressed_response_is_malformed(proxied, proxy):
    proxy.answer(http_answer("200 OK", b"no gzip", "Content-Encoding: gzip"))
    with pytest.raises(MalformedResponse, match="unpacked"):
        proxied.overview()


def test_a_path_in_the_url_prefixes_every_request(broker, proxy):
    with client(proxy.url(broker.management_url) + "/behind/a/proxy/") as proxied:
        with pytest.raises(BrokerUnavailable, match="URL leads"):  # the broker serves nothing at this path
            proxied.overview()
        assert repr(proxied) == f"<Management http://127.0.0.1:{proxy.port}/behind/a/proxy>"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:15672",
        "amqp://guest:sesame@localhost:5672",
        "http://",
        "http://guest:sesame@",
        "http://guest:sesame@localhost:sesame",
        "http://guest:sesame@localhost:0",
        "http://guest:ses/ame@localhost:15672",
        "http://guest:1#sesame@localhost:15672",
        "http://guest:1?sesame@localhost:15672",
        "http://guest:sesame@[::1",
        "http://guest:sesame@a b:15672",
        "http://guest:sesame@localhost:15672/a path",
        "http://guest:sesame@localhost:15672/caf\N{LATIN SMALL LETTER E WITH ACUTE}",
        "http://guest:sesame\udcff@localhost:15672",
        "http://guest:sesame\N{CIRCLED LATIN SMALL LETTER A}\N{FULLWIDTH COMMERCIAL AT}@localhost:15672",
    ],
)
def test_an_invalid_url_is_refused_without_showing_the_password(url):
    with pytest.raises(ValueError) as refusal:
        Management(url)
    text = str(refusal.value)
    assert "ses" not in text
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
    assert len(text) > 20


def test_the_password_is_in_no_error_and_no_log(proxy, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a client that honours it would send every request there
    address = f"127.0.0.1:{proxy.port}"
    log = logging.getLogger("calls")
    with client(
        f"http://someone:open%20sesame@{address}", read_timeout=0.3, on_call=lambda call: log.debug("%s", call)
    ) as theirs:
        texts = [repr(theirs), str(theirs)]
        for spoil in (
            proxy.forward,
            lambda: proxy.close_next(2),
            lambda: proxy.delay(1),
            lambda: proxy.answer(http_answer("502 Bad Gateway")),
            lambda: proxy.answer(http_answer("302 Found", b"", f"Location: http://{address}/")),
        ):
            proxy.forward()
            spoil()
            with pytest.raises(BrokerError) as error:
                theirs.overview()
            texts.append(str(error.value))
    assert all("GET /api/overview" in text for text in texts[2:])
    assert caplog.text
    assert not any("sesame" in text for text in [*texts, caplog.text])


def test_rates_count_what_was_published_acknowledged_and_redelivered(management, vhost, amqp):
    amqp.queue("rated", 10)
    delivery = amqp.channel.basic_get("rated")[0]
    amqp.channel.basic_nack(delivery.delivery_tag)
    for _ in range(5):
        amqp.channel.basic_ack(amqp.channel.basic_get("rated")[0].delivery_tag)
    amqp.channel.basic_get("rated", auto_ack=True)

    def counted():
        samples = management.queue_rates(vhost, "rated", 60, 5)
        return [round(5 * sum(getattr(one, rate) for one in samples)) for rate in RateSample._fields[1:]]

    wait_until(lambda: counted() == [10, 6, 1])


def test_rates_of_a_queue_without_messages_are_empty(management, vhost, amqp):
    amqp.queue("idle")
    assert management.queue_rates(vhost, "idle", 60, 5) == []
    assert management.statistics().queue_seconds >= 3600


def test_publishers_are_added_up_by_user_with_their_unroutable_messages(management, vhost, amqp, broker):
    amqp.channel.exchange_declare("events", "topic")
    other = amqp.connection.channel()
    for channel in (amqp.channel, other):
        for _ in range(2):
            channel.basic_publish("events", "nowhere", b"1")
    user = urlsplit(broker.amqp_url).username
    wait_until(lambda: [(one.user, one.unroutable) for one in management.publishers(vhost)] == [(user, 4)])
    assert management.exchange_traffic(vhost, "events").publishers == []  # rates_mode is basic
