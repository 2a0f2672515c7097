"""The private servers and processes of `tools/`: protected from others, and gone without a trace."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import psycopg2
import pytest
import redis

from tests.support.plugin import ROOT
from tests.support.toolbox import wait_until
from tools.machines import Clock, machines
from tools.postgresql import PrivateCluster
from tools.processes import ProcessGroup, StartError, port_answers, spawn
from tools.rabbitmq import PrivateNode
from tools.redis import PrivateRedis
from tools.stack import Stack, isolated
from tools.zookeeper import PrivateZooKeeper

pytestmark = [pytest.mark.soak, pytest.mark.slow]


def processes_of(directory):
    """Return the ids of the live processes with this directory in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(directory) in path.read_bytes():
                found.add(int(path.parent.name))
    return found


@contextlib.contextmanager
def program(text, *arguments):
    """Run these statements in another Python process, which then prints "ready" and waits."""
    text = textwrap.dedent(text) + "\nprint('ready', flush=True)\ntime.sleep(600)"
    command = [sys.executable, "-c", text, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


# Servers


@pytest.fixture
def node(broker):
    if broker.node is None:
        pytest.skip("the tests use an external broker")
    return broker.node


def test_a_private_rabbitmq_refuses_the_guest_user(node):
    assert httpx.get(f"http://guest:guest@127.0.0.1:{node.management_port}/api/whoami").status_code == 401


def test_a_private_rabbitmq_listens_on_127_0_0_1_only(node):
    for port in (node.port, node.management_port, node.stomp_port, node._distribution_port):
        assert port_answers(port)
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED


def test_a_private_rabbitmq_that_cannot_start_says_why_and_is_removed():
    node = PrivateNode(config={"no.such.setting": "1"})
    with pytest.raises(StartError, match=r"no\.such\.setting"):
        node.start()
    assert not processes_of(node.directory)
    assert not node.directory.exists()


def test_a_stopped_private_postgresql_is_removed():
    with PrivateCluster() as cluster:
        psycopg2.connect(cluster.create_database("some-name")).close()
        assert processes_of(cluster.directory)
    assert not processes_of(cluster.directory)
    assert not cluster.directory.exists()
    assert not port_answers(cluster.port)


def test_a_private_redis_needs_its_password_and_is_removed():
    server = PrivateRedis()
    with server, redis.Redis("127.0.0.1", server.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    assert not server.directory.exists()
    assert not port_answers(server.port)


@pytest.mark.parametrize(
    ("server", "program_", "package"),
    [
        (PrivateNode, "rabbitmq.SCRIPTS", "rabbitmq-server"),
        (PrivateRedis, "redis.PROGRAM", "redis-server"),
        (PrivateZooKeeper, "zookeeper.JAR", "zookeeper"),
    ],
)
def test_a_missing_server_names_its_package(monkeypatch, tmp_path, server, program_, package):
    monkeypatch.setattr("tools.rabbitmq.SERIES", "")
    monkeypatch.setattr(f"tools.{program_}", tmp_path / "missing")
    with pytest.raises(StartError, match=f"apt-get install {package}"):
        server()


def test_a_missing_rabbitmq_of_another_series_is_named_with_its_installer(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.rabbitmq.SERIES", "4.3")
    monkeypatch.setattr("tools.rabbitmq.SCRIPTS", tmp_path / "missing")
    with pytest.raises(StartError, match=r"tools/make-rabbitmq 4\.3"):
        PrivateNode()


@pytest.mark.parametrize(
    ("series", "user", "error"),
    [
        ("3.13", None, "Cannot install RabbitMQ '3.13'. Use BROKER=4.0 or BROKER=4.3."),
        ("4.3", "nobody", "RabbitMQ 4.3 runs in a chroot, which needs root."),
    ],
)
def test_a_rabbitmq_that_cannot_be_installed_is_refused(series, user, error):
    if os.getuid() != 0:
        user = None
    script = (ROOT / "tools/make-rabbitmq").read_text()  # another user may not be able to read the file
    done = subprocess.run(
        ["sh", "-c", script, "make-rabbitmq", series],
        user=user,
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, error in done.stderr) == (1, True)


@pytest.fixture
def installer(tmp_path):
    """Give a copy of tools/make-rabbitmq in a project where RabbitMQ 4.3 is installed."""
    if os.getuid() != 0:
        pytest.skip("it needs root")
    (tmp_path / "tools").mkdir()
    (tmp_path / "var/rabbitmq-4.3").mkdir(parents=True)
    (tmp_path / "var/rabbitmq-4.3/installed").touch()
    return shutil.copy(ROOT / "tools/make-rabbitmq", tmp_path / "tools")


def test_a_rabbitmq_that_is_installed_is_found_from_any_directory(installer):
    done = subprocess.run([installer, "4.3"], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_a_second_installation_waits_for_the_first(installer, tmp_path):
    with (tmp_path / "var/make-rabbitmq.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen([installer, "4.3"], stderr=subprocess.PIPE, text=True)
        assert second.stderr.readline() == "Waiting for another process that installs RabbitMQ\n"
        assert second.poll() is None
    with second:
        assert second.wait(10) == 0


# The Makefile


def planned(*arguments, **environment):
    """Return what make would run."""
    outer = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # the arguments of `make soak`
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=outer | environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "name", "value", "command"),
    [
        ("test", "BROKER", "4.3", "tools/make-rabbitmq 4.3"),
        ("test", "ONLY", "rabbit/test_names.py", "tests/rabbit/test_names.py"),
        ("run", "WEB", "2", "tools.run --web 2"),
        ("run", "WORKERS", "2", "tools.run  --workers 2"),
        ("soak", "SECONDS", "60", "tools.chaos --seconds 60"),
        ("soak", "SEED", "7", "tools.chaos  --seed 7"),
        ("soak", "STORE", "cassandra", "tools.chaos   --store cassandra"),
    ],
)
def test_make_takes_its_arguments_from_the_command_line_only(target, name, value, command):
    assert command in planned(target, f"{name}={value}")
    assert command not in planned(target, **{name: value})


# Machines


@pytest.mark.soak
def test_only_the_wall_clock_of_a_program_is_shifted(tmp_path):
    program = "import time; print(time.time(), time.monotonic())"
    command = [*Clock(tmp_path).shifted(-3600), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, monotonic = map(float, done.stdout.split())
    assert wall == pytest.approx(time.time() - 3600, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="creates networks and mounts disks")
def test_a_machine_can_be_cut_off_and_its_disk_filled():
    with machines(1) as (machine,):
        server = subprocess.Popen([*machine.command, sys.executable, "-m", "http.server", "8000"])
        try:
            wait_until(lambda: accepts_connections(machine.address))
            machine.cut_off()
            assert not accepts_connections(machine.address)
            machine.reconnect()
            wait_until(lambda: accepts_connections(machine.address))
        finally:
            server.kill()
            server.wait()
        machine.fill_disk()
        with pytest.raises(OSError, match="No space left"):
            (machine.disk / "file").write_bytes(b"text")
        machine.free_disk()
        (machine.disk / "file").write_bytes(b"text")
    assert not machine.disk.exists()


def accepts_connections(address):
    try:
        socket.create_connection((address, 8000), timeout=1).close()
    except OSError:
        return False
    return True


def test_servers_end_when_their_parent_is_killed(tmp_path):
    text = """
        import pathlib, sys, time
        from tools.postgresql import PrivateCluster
        from tools.rabbitmq import PrivateNode
        node = PrivateNode(directory=pathlib.Path(sys.argv[1], "rabbitmq")).start()
        cluster = PrivateCluster().start()
        pathlib.Path(sys.argv[1], "cluster").write_text(str(cluster.directory))
    """
    (tmp_path / "rabbitmq").mkdir()
    with program(text, str(tmp_path)) as process:
        cluster = Path((tmp_path / "cluster").read_text())
        assert len(processes_of(tmp_path)) >= 3
        assert processes_of(cluster)
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(tmp_path) and not processes_of(cluster))
    subprocess.run(["rm", "-r", cluster], check=True)


# Processes


def test_a_restarted_process_continues_its_log(tmp_path):
    lines = []
    group = ProcessGroup(os.environ, directory=tmp_path, logs=tmp_path, show=lambda *line: lines.append(line))
    command = ["/bin/sh", "-c", "trap 'echo ended; exit 3' TERM; echo up; while :; do sleep 0.02; done"]
    group.start("one", command)
    wait_until(lambda: lines == [("one", "up")])
    assert group.end("one", timeout=10) == 3
    assert not group.ended()  # it was ended on request
    group.start("one", command)
    wait_until(lambda: group.log("one").read_text() == "up\nended\nup\n")
    group.kill("one")
    assert not group.ended()
    group.stop()


def test_a_process_that_exits_is_reported(tmp_path):
    group = ProcessGroup(os.environ, directory=tmp_path, logs=tmp_path)
    group.start("one", ["/bin/sh", "-c", "exit 3"])
    wait_until(group.ended)
    assert group.ended() == {"one": 3}
    group.stop()


def test_a_stubborn_process_is_killed_with_its_children(tmp_path):
    group = ProcessGroup({**os.environ, "MARK": str(tmp_path)}, directory=tmp_path, logs=tmp_path)
    group.start("stubborn", ["/bin/sh", "-c", "trap '' TERM; sleep 600 & while :; do sleep 600; done"])
    wait_until(lambda: len(processes_of(tmp_path)) == 3)
    group.stop(timeout=0.3)
    wait_until(lambda: not processes_of(tmp_path))


def test_a_process_outlives_the_thread_that_started_it(tmp_path):
    children = []

    def start():
        children.append(spawn(["sleep", "600"], environment=os.environ, directory=tmp_path, output=subprocess.DEVNULL))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired):
        children[0].wait(0.5)
    children[0].kill()
    assert children[0].wait(5) == -signal.SIGKILL


# The whole stack


def test_a_second_stack_on_the_same_files_is_refused(tmp_path):
    first = Stack({}, var=tmp_path, say=lambda text: None)
    first._lock_var()
    with pytest.raises(StartError, match="another Guardian is running"):
        Stack({}, var=tmp_path, say=lambda text: None).prepare()
    first.stop()


def test_two_concurrent_stacks_have_different_addresses(tmp_path):
    with contextlib.ExitStack() as stacks:
        both = [stacks.enter_context(Stack({}, var=tmp_path / one, say=lambda text: None, web=2)) for one in "ab"]
        for stack in both:
            stack._var.mkdir()
            stack._choose_settings()
        addresses = [address for stack in both for address in stack.addresses.values()]
        assert len(set(addresses)) == 4
        assert [stack.base_url for stack in both] == [stack.addresses["web-1"] for stack in both]


def test_the_private_broker_is_shown_to_owners_without_its_password(tmp_path):
    stack = Stack({"GUARDIAN_PUBLIC_STOMP_URL": "wss://rabbit.example.org/ws"}, var=tmp_path, say=lambda text: None)
    stack._choose_broker()
    assert stack.environment["GUARDIAN_PUBLIC_AMQP_URL"] == f"amqp://127.0.0.1:{stack.node.port}"
    assert stack.environment["GUARDIAN_PUBLIC_STOMP_URL"] == "wss://rabbit.example.org/ws"


def test_an_isolated_environment_leaves_no_setting_to_the_env_file():
    documented = re.findall(r"^# ([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    environment = isolated({"GUARDIAN_POLL_SECONDS": "1"})
    assert environment.keys() >= set(documented)
    assert environment["GUARDIAN_POLL_SECONDS"] == "1"
