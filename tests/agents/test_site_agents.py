"""The unchanged waldur-site-agent from PyPI, run as its own process."""

import contextlib
import json
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agents.events import publishing
from agents.models import AgentIdentity, Consumer, EventSubscription, SubscriptionQueue
from queues.guard import once
from rabbit.errors import NotOnBroker
from tests.support.toolbox import wait_until
from tools.processes import ProcessGroup

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
VERSIONS = ("1.0.5", "1.0.7", "1.0.8rc12")
HEARTBEAT = Path("/tmp/waldur-site-agent-heartbeat")  # the agent cannot be configured to use another path


class Agent:
    """One version of the agent, with its own owner and offering."""

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
        # The agent reads YAML, and JSON is YAML.
        (self._directory / "config.yaml").write_text(json.dumps({"offerings": [offering]}))
        self._log = self._directory / "agent.log"
        self._group = None

    def start(self):
        environment = {"PATH": os.defpath, "HOME": str(self._directory), "LANG": "C.UTF-8"}
        self._group = ProcessGroup(environment, directory=self._directory, logs=self._directory)
        self._log.unlink(missing_ok=True)
        self._group.start("agent", [self._program, "--mode", "event_process", "--config-file", "config.yaml"])

    def stop(self, timeout=15):
        """Terminate the agent, and kill it after the timeout."""
        if self._group is not None:
            self._group.stop(timeout)

    def logged(self):
        """Return the logged texts since the start: each line is a JSON object with the text as `event`."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]

    def wait_for_log(self, text, timeout=40):
        deadline = time.monotonic() + timeout
        while not any(text in line for line in self.logged()):
            running = not self._group.ended()
            assert running, f"{self.version} has ended: {self._log.read_text()}"
            assert time.monotonic() < deadline, "\n".join([f"{self.version} does not log {text!r}", *self.logged()])
            time.sleep(0.1)

    def queue(self):
        """Return vhost and name of the queue of its orders."""
        if self.version == "1.0.5":
            row = SubscriptionQueue.objects.get(offering=self.offering, object_type="order")
        else:
            row = Consumer.objects.get(identity__offering=self.offering)
        return row.vhost, row.queue_name

    def rows(self):
        """Return the ids of all that it registered."""
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
        """Delete the subscription or consumer of its queue."""
        if self.version == "1.0.5":
            EventSubscription.objects.get(queues__offering=self.offering, queues__object_type="order").delete()
        else:
            Consumer.objects.get(identity__offering=self.offering).delete()


@pytest.fixture
def site_agents(agents, guarded, settings, live_server, stomp_url, tmp_path):
    was_there = HEARTBEAT.exists()
    made = [Agent(version, agents, tmp_path, f"{live_server.url}/api/", stomp_url) for version in VERSIONS]
    settings.GUARDIAN_VHOSTS = [guarded, *(agent.owner.uuid.hex for agent in made)]
    with contextlib.ExitStack() as stack:
        for agent in made:
            stack.callback(agent.stop, timeout=0.2)
        yield made
    if not was_there:
        HEARTBEAT.unlink(missing_ok=True)


def publish_order(agent, order):
    """Publish the event of a finished order, and wait until the agent has handled it."""
    published = publishing.publish(
        agent.offering, "order", {"order_uuid": order, "order_state": "done"}, by=agent.owner
    )
    assert published.delivered == 1
    agent.wait_for_log(f"Skipping order {order} with finished state done")


def test_all_versions_register_receive_events_recover_restart_and_are_removed(site_agents, management):
    for agent in site_agents:
        agent.start()
    for agent in site_agents:
        agent.wait_for_log("Signal handlers set")
    registered = {agent.version: agent.rows() for agent in site_agents}
    numbers = {version: {model: len(uuids) for model, uuids in rows.items()} for version, rows in registered.items()}
    # 1.0.5 subscribes to orders only; newer ones have one queue for all types.
    assert numbers == {
        "1.0.5": {"AgentIdentity": 1, "EventSubscription": 1, "SubscriptionQueue": 1, "Consumer": 0},
        "1.0.7": {"AgentIdentity": 1, "EventSubscription": 0, "SubscriptionQueue": 0, "Consumer": 1},
        "1.0.8rc12": {"AgentIdentity": 1, "EventSubscription": 0, "SubscriptionQueue": 0, "Consumer": 1},
    }
    for agent in site_agents:
        publish_order(agent, "first")

    lost = {agent.version: agent.queue() for agent in site_agents}
    once.run_once()
    for queue in lost.values():
        management.delete_queue(*queue)
    for agent in site_agents:
        agent.wait_for_log("Received an error")
    for _ in range(2):
        once.run_once()
    for agent in site_agents:
        wait_until(lambda queue=lost[agent.version]: management.queue(*queue).get("consumers") == 1, seconds=40)
        publish_order(agent, "after the loss")

    for agent in site_agents:
        agent.stop()
        agent.start()
    for agent in site_agents:
        agent.wait_for_log("Signal handlers set")
        assert not any("Registered new identity" in line for line in agent.logged())
        publish_order(agent, "second")
    older = site_agents[0]
    answers = [
        line for line in older.logged() if line.startswith("HTTP Request: POST")
    ]  # newer ones do not log requests
    assert any('create_queue/ "HTTP/1.1 200 OK"' in answer for answer in answers), answers
    assert {agent.version: agent.rows() for agent in site_agents} == registered

    for agent in site_agents:
        vhost, name = agent.queue()
        agent.remove()
        with pytest.raises(NotOnBroker):
            management.queue(vhost, name)
        agent.wait_for_log("Disconnected from queue")
