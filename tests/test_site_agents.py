"""The agents in the field: waldur-site-agent from PyPI, unchanged, run as its own process."""

import contextlib
import json
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agents import events
from agents.models import AgentIdentity, Consumer, EventSubscription, SubscriptionQueue
from rabbit.management import NotOnBroker
from tools.processes import ProcessGroup

PROJECT = Path(__file__).resolve().parent.parent
VERSIONS = ("1.0.5", "1.0.7")
HEARTBEAT = Path("/tmp/waldur-site-agent-heartbeat")  # where it is, nobody can tell the agent otherwise


class Agent:
    """One version of the agent, with an owner and an offering of its own."""

    def __init__(self, version, agents, directory, api_url, stomp_url):
        self.version = version
        self.owner = agents.owner()
        self.offering = agents.offering(self.owner, publishers=(self.owner,))
        self._program = PROJECT / "var" / "site-agents" / version / "bin" / "waldur_site_agent"
        assert self._program.exists(), f"{self._program} is missing: `make site-agents` installs it"
        self._directory = directory / version
        self._directory.mkdir()
        address = urlsplit(stomp_url)
        offering = {
            "name": self.offering.name,
            "waldur_api_url": api_url,
            "waldur_api_token": agents.token(self.owner).key,
            "waldur_offering_uuid": str(self.offering.uuid),
            "backend_type": "none",
            "order_processing_backend": "none",
            "stomp_enabled": True,
            "stomp_ws_host": address.hostname,
            "stomp_ws_port": address.port,
            "stomp_ws_path": address.path,
            "websocket_use_tls": False,
        }
        # YAML is what it reads, and JSON is YAML.
        (self._directory / "config.yaml").write_text(json.dumps({"offerings": [offering]}))
        self._log = self._directory / "agent.log"
        self._group = None

    def start(self):
        environment = {"PATH": os.defpath, "HOME": str(self._directory), "LANG": "C.UTF-8"}
        self._group = ProcessGroup(environment, directory=self._directory, logs=self._directory)
        self._log.unlink(missing_ok=True)
        self._group.start("agent", [self._program, "--mode", "event_process", "--config-file", "config.yaml"])

    def stop(self, timeout=15):
        """End it as its operator would; after so many seconds it is killed."""
        if self._group is not None:
            self._group.stop(timeout)

    def said(self):
        """What it has logged since its start: a line is a JSON object with the text as its `event`."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]

    def wait_until_it_says(self, text, timeout=40):
        deadline = time.monotonic() + timeout
        while not any(text in line for line in self.said()):
            running = not self._group.ended()
            assert running, f"{self.version} has ended: {self._log.read_text()}"
            assert time.monotonic() < deadline, "\n".join([f"{self.version} does not say {text!r}", *self.said()])
            time.sleep(0.1)

    def queue(self):
        """The vhost and the name of the queue in which its orders arrive."""
        if self.version == "1.0.5":
            row = SubscriptionQueue.objects.get(offering=self.offering, object_type="order")
        else:
            row = Consumer.objects.get(identity__offering=self.offering)
        return row.vhost, row.queue_name

    def rows(self):
        """All that it has registered."""
        return {
            model.__name__: sorted(model.objects.filter(**{path: self.offering}).values_list("uuid", flat=True))
            for model, path in (
                (AgentIdentity, "offering"),
                (EventSubscription, "identity__offering"),
                (SubscriptionQueue, "offering"),
                (Consumer, "identity__offering"),
            )
        }

    def remove(self):
        """Remove what its queue came from."""
        if self.version == "1.0.5":
            EventSubscription.objects.get(queues__offering=self.offering, queues__object_type="order").delete()
        else:
            Consumer.objects.get(identity__offering=self.offering).delete()


@pytest.fixture
def agents_in_the_field(agents, live_server, stomp_url, tmp_path):
    was_there = HEARTBEAT.exists()
    made = [Agent(version, agents, tmp_path, f"{live_server.url}/api/", stomp_url) for version in VERSIONS]
    with contextlib.ExitStack() as stack:
        for agent in made:
            stack.callback(agent.stop, timeout=0.2)
        yield made
    if not was_there:
        HEARTBEAT.unlink(missing_ok=True)


def tell(agent, order):
    """Publish the event of a finished order, and wait for the agent's handler to deal with it."""
    published = events.publish(agent.offering, "order", {"order_uuid": order, "order_state": "done"}, by=agent.owner)
    assert published.delivered == 1
    agent.wait_until_it_says(f"Skipping order {order} with finished state done")


def test_both_register_are_told_start_again_and_are_removed(agents_in_the_field, management):
    for agent in agents_in_the_field:
        agent.start()
    for agent in agents_in_the_field:
        agent.wait_until_it_says("Signal handlers set")
    registered = {agent.version: agent.rows() for agent in agents_in_the_field}
    numbers = {version: {model: len(uuids) for model, uuids in rows.items()} for version, rows in registered.items()}
    # The older one wants orders and nothing else; the newer one has one queue for whatever it wants.
    assert numbers == {
        "1.0.5": {"AgentIdentity": 1, "EventSubscription": 1, "SubscriptionQueue": 1, "Consumer": 0},
        "1.0.7": {"AgentIdentity": 1, "EventSubscription": 0, "SubscriptionQueue": 0, "Consumer": 1},
    }
    for agent in agents_in_the_field:
        tell(agent, "first")

    for agent in agents_in_the_field:
        agent.stop()
        agent.start()
    for agent in agents_in_the_field:
        agent.wait_until_it_says("Signal handlers set")
        assert not any("Registered new identity" in line for line in agent.said())
        tell(agent, "second")
    older, _ = agents_in_the_field
    answers = [line for line in older.said() if line.startswith("HTTP Request: POST")]  # the newer one keeps them quiet
    assert any('create_queue/ "HTTP/1.1 200 OK"' in answer for answer in answers), answers
    assert {agent.version: agent.rows() for agent in agents_in_the_field} == registered

    for agent in agents_in_the_field:
        vhost, name = agent.queue()
        agent.remove()
        with pytest.raises(NotOnBroker):
            management.queue(vhost, name)
        agent.wait_until_it_says("Disconnected from queue")
