"""A private RabbitMQ cluster of three nodes, for tests and the chaos run.

The second and the third node join the first one by the configuration of docker-compose.yml.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rabbit.errors import BrokerError
from rabbit.management import Management
from tools.processes import StartError, happens
from tools.rabbitmq import PrivateNode

NAMES = ("one", "two", "three")
JOIN = Path(__file__).resolve().parent.parent / "deploy" / "rabbitmq" / "join.conf"
START_SECONDS = 180
"""Nodes that start at once share the cores."""

MEMBERS_SECONDS = 120


class RabbitCluster:
    """Three nodes of one cluster. Use it as a context manager."""

    def __init__(self, *, plugins: Sequence[str] = ("rabbitmq_management",)) -> None:
        self._exits = ExitStack()
        self.nodes: list[PrivateNode] = []
        for name in NAMES:
            peer = self.nodes[0] if self.nodes else None
            config = joining(peer.name) if peer is not None else None
            node = PrivateNode(name=name, plugins=plugins, peer=peer, config=config)
            self._exits.callback(node.stop)
            self.nodes.append(node)

    @property
    def management_url(self) -> str:
        return ",".join(node.management_url for node in self.nodes)

    @property
    def amqp_url(self) -> str:
        return ",".join(node.amqp_url for node in self.nodes)

    def start(self) -> Self:
        try:
            first, *others = self.nodes
            first.start(START_SECONDS)
            with ThreadPoolExecutor(len(others)) as threads:
                list(threads.map(lambda node: node.start(START_SECONDS), others))
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> None:
        if not happens(self._is_complete, MEMBERS_SECONDS):
            raise StartError(f"the nodes were no cluster after {MEMBERS_SECONDS} s")

    def _is_complete(self) -> bool:
        try:
            return all(
                [one.running for one in Management(node.management_url).nodes()] == [True] * len(self.nodes)
                for node in self.nodes
            )
        except BrokerError:
            return False

    def stop(self) -> None:
        self._exits.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def joining(first: str) -> dict[str, str]:
    """Return the configuration of docker-compose.yml for a node that joins the first one, with this node's name."""
    lines = [line.partition("=") for line in JOIN.read_text().splitlines() if line and not line.startswith("#")]
    return {key.strip(): value.strip().replace("rabbit@rabbitmq", first) for key, _, value in lines}
