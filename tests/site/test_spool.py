"""The spool: tasks in a folder, whose readers see whole messages only."""

import multiprocessing
import time
from pathlib import Path
from queue import Empty

import pytest
from kombu import Connection, Exchange, Queue


def connection(folder: Path) -> Connection:
    options = {"data_folder_in": str(folder), "data_folder_out": str(folder), "control_folder": str(folder / "control")}
    return Connection("filesystem://", transport="guardian_site.spool:Transport", transport_options=options)


def publish(folder: Path, sender: int, messages: int) -> None:
    with connection(folder) as spool, spool.Producer() as producer:
        for number in range(messages):
            producer.publish({"number": [sender, number]}, exchange="", routing_key="tasks")


def bind(folder: Path, name: str) -> None:
    with connection(folder) as spool, spool.channel() as channel:
        Queue(name, Exchange("everybody", "fanout"), channel=channel).declare()


def in_processes(function: object, *calls: tuple[object, ...]) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=function, args=arguments) for arguments in calls]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("messages", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_a_busy_reader_gets_every_message_once_and_whole(tmp_path: Path, messages: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    senders = [spawn.Process(target=publish, args=(tmp_path, sender, messages)) for sender in range(2)]
    for sender in senders:
        sender.start()
    seen = []
    with connection(tmp_path) as spool, spool.channel() as channel:
        deadline = time.monotonic() + 60
        while len(seen) < 2 * messages and time.monotonic() < deadline:
            try:
                message = channel._get("tasks")  # a worker does this five times a second
            except Empty:
                continue
            seen.append(tuple(spool.channel().message_to_python(message).decode()["number"]))
    for sender in senders:
        sender.join(10)
    assert sorted(seen) == [(sender, number) for sender in range(2) for number in range(messages)]


@pytest.mark.slow
def test_two_workers_binding_concurrently_are_both_bound(tmp_path: Path) -> None:
    in_processes(bind, (tmp_path, "one"), (tmp_path, "two"))
    with connection(tmp_path) as spool, spool.channel() as channel:
        assert sorted(bound.queue for bound in channel.get_table("everybody")) == ["one", "two"]


def test_publishing_leaves_no_unfinished_files(tmp_path: Path) -> None:
    publish(tmp_path, 1, 10)
    assert not list(tmp_path.glob("*.unfinished"))
