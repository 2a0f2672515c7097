"""The private servers and processes of `local/`: they work, and nothing of them stays."""

import contextlib
import email.message
import errno
import os
import signal
import smtplib
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pika
import psycopg2
import pytest
import redis

from local.mail import MailCatcher
from local.postgresql import PrivateCluster
from local.processes import Group, StartError, free_port, port_answers, spawn
from local.rabbitmq import ControlError, PrivateNode, stomp_url_of
from local.redis import PrivateRedis
from local.stack import Stack

PROJECT = Path(__file__).resolve().parent.parent


def processes_of(directory):
    """The ids of the live processes that were started with this directory in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(directory) in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def wait_until(condition, timeout=10):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def program(text, *arguments):
    """Another Python program that starts something, prints a line when it is there, and then does nothing."""
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(text) + "\nprint('ready', flush=True)\ntime.sleep(600)",
        *arguments,
    ]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def send(url, *, to="owner@example.org", subject="Subject", body="Text\n"):
    message = email.message.EmailMessage()
    message["From"] = "guardian@example.org"
    message["To"] = to
    message["Subject"] = subject
    message.set_content(body)
    host, port = url.removeprefix("smtp://").split(":")
    with smtplib.SMTP(host, int(port), timeout=5) as client:
        client.send_message(message)


@pytest.fixture(scope="module")
def node():
    with PrivateNode() as node:
        yield node


class TestPrivateNode:
    def test_the_management_api_and_amqp_answer_to_its_own_account(self, node):
        me = httpx.get(f"{node.management_url}/api/whoami").json()
        assert me["name"] == "guardian"
        assert "administrator" in me["tags"]
        with contextlib.closing(pika.BlockingConnection(pika.URLParameters(f"{node.amqp_url}/%2F"))) as connection:
            assert connection.is_open

    def test_its_overview_tells_where_agents_connect(self, node):
        overview = httpx.get(f"{node.management_url}/api/overview").json()
        assert stomp_url_of(overview, "127.0.0.1") == node.stomp_url
        others = [row for row in overview["listeners"] if row["protocol"] != "http/web-stomp"]
        assert stomp_url_of({**overview, "listeners": others}, "127.0.0.1") is None

    def test_nobody_else_gets_in(self, node):
        assert httpx.get(f"http://guest:guest@127.0.0.1:{node.management_port}/api/whoami").status_code == 401

    def test_it_listens_on_this_machine_alone(self, node):
        for port in (node.port, node.management_port, node.stomp_port, node._distribution_port):
            assert port_answers(port)
            with socket.socket() as client:
                assert client.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED

    def test_rabbitmqctl_works_on_it_and_says_why_it_failed(self, node):
        assert node.eval("1 + 1") == "2"
        assert node.eval("node().") == node.name
        with pytest.raises(ControlError, match="does not exist"):
            node.ctl("delete_user", "nobody")

    def test_its_schedulers_may_move_between_the_cores_that_it_shares(self, node):
        assert node.eval("erlang:system_info(scheduler_bind_type).") == "unbound"

    def test_suspended_it_accepts_and_answers_nothing_until_it_goes_on(self, node):
        node.suspend()
        try:
            assert port_answers(node.management_port)
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{node.management_url}/api/whoami", timeout=0.5)
        finally:
            node.resume()
        assert httpx.get(f"{node.management_url}/api/whoami").status_code == 200

    def test_it_is_named_what_to_install_where_rabbitmq_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr("local.rabbitmq.SCRIPTS", tmp_path)
        with pytest.raises(StartError, match="apt-get install rabbitmq-server"):
            PrivateNode()

    def test_a_node_that_cannot_start_says_why_and_leaves_nothing(self):
        node = PrivateNode(config={"no.such.setting": "1"})
        with pytest.raises(StartError, match=r"no\.such\.setting"):
            node.start()
        assert not processes_of(node.directory)
        assert not node.directory.exists()

    @pytest.mark.slow
    def test_stopped_it_leaves_no_process_no_port_and_no_file(self):
        with PrivateNode() as node:
            names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes_of(node.directory)}
            assert {"beam.smp", "epmd"} <= names
        assert not processes_of(node.directory)
        assert not node.directory.exists()
        assert not any(
            port_answers(port) for port in (node.port, node.management_port, node.stomp_port, node._epmd_port)
        )

    @pytest.mark.slow
    def test_killed_and_started_again_it_has_its_data_and_ports(self, tmp_path):
        with PrivateNode(directory=tmp_path) as node:
            url = f"{node.management_url}/api/queues/%2F/kept"
            assert httpx.put(url, json={"durable": True}).status_code == 201
            node.eval("mnesia:dump_log()")  # what was declared in the last seconds doesn't always survive a kill
            with pytest.raises(StartError, match="another program"):
                PrivateNode(directory=tmp_path)
            node.kill()
            assert not port_answers(node.port)
            node.start()
            assert httpx.get(url).status_code == 200
        assert not processes_of(tmp_path)
        again = PrivateNode(directory=tmp_path)
        assert (again.amqp_url, again.management_url) == (node.amqp_url, node.management_url)

    @pytest.mark.slow
    def test_it_ends_when_the_program_that_started_it_is_killed(self, tmp_path):
        text = """
            import pathlib, sys, time
            from local.rabbitmq import PrivateNode
            node = PrivateNode(directory=pathlib.Path(sys.argv[1])).start()
        """
        with program(text, str(tmp_path)) as process:
            assert len(processes_of(tmp_path)) >= 2
            process.kill()
            process.wait()
            wait_until(lambda: not processes_of(tmp_path) - {process.pid})


class TestPrivateCluster:
    def test_it_answers_and_leaves_nothing(self):
        with PrivateCluster() as cluster:
            with contextlib.closing(psycopg2.connect(cluster.create_database("some-name"))) as connection:
                cursor = connection.cursor()
                cursor.execute("SELECT current_database(), current_setting('fsync')")
                assert cursor.fetchone() == ("some-name", "off")
            assert processes_of(cluster.directory)
        assert not processes_of(cluster.directory)
        assert not cluster.directory.exists()
        assert not port_answers(cluster.port)

    def test_a_database_goes_whoever_is_connected_to_it(self):
        with PrivateCluster() as cluster:
            url = cluster.create_database("gone")
            with contextlib.closing(psycopg2.connect(url)):
                cluster.drop_database("gone")
            with pytest.raises(psycopg2.OperationalError, match='database "gone" does not exist'):
                psycopg2.connect(url)

    def test_halted_and_started_again_it_has_its_data(self):
        with PrivateCluster() as cluster:
            url = cluster.create_database("kept")
            cluster.halt()
            assert not port_answers(cluster.port)
            cluster.start()
            psycopg2.connect(url).close()
            assert port_answers(cluster.port)

    def test_it_ends_when_the_program_that_started_it_is_killed(self, tmp_path):
        text = """
            import pathlib, sys, time
            from local.postgresql import PrivateCluster
            cluster = PrivateCluster().start()
            pathlib.Path(sys.argv[1]).write_text(str(cluster.directory))
        """
        told = tmp_path / "directory"
        with program(text, str(told)) as process:
            directory = Path(told.read_text())
            assert processes_of(directory)
            process.kill()
            process.wait()
            wait_until(lambda: not processes_of(directory))
        subprocess.run(["rm", "-r", directory], check=True)


class TestPrivateRedis:
    def test_killed_and_started_again_it_has_its_data_and_stopped_it_leaves_nothing(self):
        with PrivateRedis() as server:
            with redis.Redis.from_url(server.url) as client:
                client.set("kept", "a value")
            server.kill()
            assert not port_answers(server.port)
            server.start()
            with redis.Redis.from_url(server.url) as client:
                assert client.get("kept") == b"a value"
        assert not server.directory.exists()
        assert not port_answers(server.port)

    def test_nobody_gets_in_without_its_password(self):
        with (
            PrivateRedis() as server,
            redis.Redis("127.0.0.1", server.port) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()

    def test_it_is_named_what_to_install_where_redis_is_missing(self, monkeypatch, tmp_path):
        monkeypatch.setattr("local.redis.PROGRAM", tmp_path / "redis-server")
        with pytest.raises(StartError, match="apt-get install redis-server"):
            PrivateRedis()


class TestMailCatcher:
    def test_it_keeps_what_it_is_given(self):
        caught = []
        with MailCatcher(on_mail=caught.append) as catcher:
            send(catcher.url, to="ana@example.org", subject="Länge: 2000", body="Zu lang\n")
        assert catcher.mails == caught == catcher.to("ana@example.org")
        (mail,) = caught
        assert mail.sender == "guardian@example.org"
        assert mail.recipients == ("ana@example.org",)
        assert mail.subject == "Länge: 2000"
        assert mail.text == "Zu lang\n"
        assert mail.html == ""

    def test_refusing_it_says_try_again_later(self):
        with MailCatcher() as catcher:
            catcher.refuse(True)
            with pytest.raises(smtplib.SMTPSenderRefused) as refused:
                send(catcher.url)
            assert refused.value.smtp_code == 451
            catcher.refuse(False)
            send(catcher.url)
            assert len(catcher.mails) == 1

    def test_a_rejected_recipient_is_refused_for_good(self):
        with MailCatcher() as catcher:
            catcher.rejected.add("gone@example.org")
            with pytest.raises(smtplib.SMTPRecipientsRefused) as refused:
                send(catcher.url, to="gone@example.org")
            assert refused.value.recipients["gone@example.org"][0] == 550
            assert not catcher.mails

    def test_stopped_it_refuses_connections_and_comes_back_on_its_port(self):
        with MailCatcher() as catcher:
            url = catcher.url
            send(url, subject="before")
            catcher.stop()
            with pytest.raises(ConnectionRefusedError):
                send(url)
            catcher.start()
            send(url, subject="after")
            assert [mail.subject for mail in catcher.mails] == ["before", "after"]

    def test_one_can_wait_for_a_mail(self):
        with MailCatcher() as catcher:
            later = threading.Timer(0.2, send, [catcher.url], {"subject": "late"})
            later.start()
            assert catcher.wait_for(lambda mail: mail.subject == "late", timeout=5).subject == "late"
            later.join()
            with pytest.raises(TimeoutError, match="late"):
                catcher.wait_for(lambda mail: mail.subject == "never", timeout=0.1)


class TestGroup:
    def test_the_output_is_shown_with_the_name_and_logged(self, tmp_path):
        lines = []
        group = Group(os.environ, directory=tmp_path, logs=tmp_path / "log", show=lambda *line: lines.append(line))
        group.start("one", ["/bin/sh", "-c", "echo first; echo second >&2; exit 3"])
        wait_until(lambda: group.ended())
        assert group.ended() == {"one": 3}
        group.stop()
        assert lines == [("one", "first"), ("one", "second")]
        assert group.log("one").read_text() == "first\nsecond\n"

    def test_the_one_started_last_is_asked_to_end_first(self, tmp_path):
        lines = []
        group = Group(os.environ, directory=tmp_path, logs=tmp_path, show=lambda *line: lines.append(line))
        for name in ("first", "second"):
            group.start(
                name, ["/bin/sh", "-c", "trap 'echo ended; exit 0' TERM; echo up; while :; do sleep 0.02; done"]
            )
        wait_until(lambda: len(lines) == 2)
        group.stop()
        assert sorted(lines) == [("first", "ended"), ("first", "up"), ("second", "ended"), ("second", "up")]
        assert not group.ended()

    def test_one_that_was_ended_can_be_started_again_and_its_log_goes_on(self, tmp_path):
        group = Group(os.environ, directory=tmp_path, logs=tmp_path)
        command = ["/bin/sh", "-c", "trap 'echo ended; exit 3' TERM; echo up; while :; do sleep 0.02; done"]
        group.start("one", command)
        wait_until(lambda: group.log("one").exists() and "up" in group.log("one").read_text())
        assert group.end("one", timeout=10) == 3
        assert not group.ended()  # by itself
        group.start("one", command)
        wait_until(lambda: group.log("one").read_text().endswith("ended\nup\n"))
        group.kill("one")
        assert not group.ended()
        group.stop()

    def test_a_child_has_the_open_files_that_it_is_to_inherit(self, tmp_path):
        group = Group(os.environ, directory=tmp_path, logs=tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            group.start("one", ["readlink", f"/proc/self/fd/{listener.fileno()}"], inherited=[listener.fileno()])
            wait_until(lambda: group.ended() == {"one": 0})
            group.stop()
        assert group.log("one").read_text().startswith("socket:")

    def test_one_that_does_not_end_is_killed_with_its_children(self, tmp_path):
        group = Group({**os.environ, "MARK": str(tmp_path)}, directory=tmp_path, logs=tmp_path)
        group.start("stubborn", ["/bin/sh", "-c", "trap '' TERM; sleep 600 & while :; do sleep 600; done"])
        wait_until(lambda: len(processes_of(tmp_path)) == 3)
        group.stop(timeout=0.3)
        wait_until(lambda: not processes_of(tmp_path))

    def test_a_child_outlives_the_thread_that_started_it(self, tmp_path):
        children = []

        def start():
            children.append(
                spawn(["sleep", "600"], environment=os.environ, directory=tmp_path, output=subprocess.DEVNULL)
            )

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            children[0].wait(0.5)
        children[0].kill()
        assert children[0].wait(5) == -signal.SIGKILL

    def test_children_end_when_the_program_that_started_them_is_killed(self, tmp_path):
        text = """
            import os, pathlib, sys, time
            from local.processes import Group
            here = pathlib.Path(sys.argv[1])
            Group({**os.environ, "MARK": sys.argv[1]}, directory=here, logs=here).start("one", ["sleep", "600"])
        """
        with program(text, str(tmp_path)) as process:
            wait_until(lambda: processes_of(tmp_path))
            process.kill()
            process.wait()
            wait_until(lambda: not processes_of(tmp_path))


def test_a_free_port_is_the_preferred_one_unless_it_is_taken():
    port = free_port()
    assert free_port(preferred=port) == port
    with MailCatcher(port=port):
        assert free_port(preferred=port) != port


def test_a_second_stack_on_the_same_files_is_refused(tmp_path):
    first = Stack({}, var=tmp_path, say=lambda text: None)
    first._take_var()
    with pytest.raises(StartError, match="another Guardian is running"):
        Stack({}, var=tmp_path, say=lambda text: None).prepare()
    first.stop()


def test_two_stacks_that_begin_at_once_have_addresses_of_their_own(tmp_path):
    with contextlib.ExitStack() as stacks:
        both = [stacks.enter_context(Stack({}, var=tmp_path / one, say=lambda text: None, web=2)) for one in "ab"]
        for stack in both:
            stack._var.mkdir()
            stack._choose_settings()
        addresses = [address for stack in both for address in stack.addresses.values()]
        assert len(set(addresses)) == 4
        assert [stack.base_url for stack in both] == [stack.addresses["web-1"] for stack in both]
