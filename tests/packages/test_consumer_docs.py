"""The example of the guide to consumers runs as the guide says."""

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from guardian_consumers import Settings
from tests.support.consumers import settings_at, without_django
from tests.support.toolbox import wait_until

PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "docs" / "consumers.md").read_text()


def command(beginning):
    """Return the arguments of the guide's command that starts like this."""
    [line] = re.findall(rf"^    \.venv/bin/python ({re.escape(beginning)}.*)$", TEXT, re.MULTILINE)
    return [sys.executable, *shlex.split(line)]


@pytest.fixture
def environment(broker, vhost):
    return {
        **without_django(),
        "RABBIT_URL": settings_at(broker.amqp_url, vhost).url,
        "RABBIT_EXCHANGE_NAME": "shop_local",
    }


@pytest.mark.slow
def test_the_example_of_the_guide_prints_what_the_guide_says(environment, amqp):
    consumers = subprocess.Popen(
        command("-m guardian_consumers"), cwd=PROJECT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    lines = SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line.strip()) for line in consumers.stdout], daemon=True).start()
    try:
        order = command("-m docs.examples.shop")

        def is_ordered():  # fails until a consumer reads orders
            ordered = subprocess.run(order, cwd=PROJECT, env=environment, check=False, capture_output=True)
            return ordered.returncode == 0

        wait_until(is_ordered)
        printed = [lines.get(timeout=15) for _ in range(3)]
        subprocess.run([*order[:3], "nobody", "book"], cwd=PROJECT, env=environment, check=True)
        parked = wait_until(lambda: amqp.channel.basic_get("shop_local_orders.parked", auto_ack=True)[1])
        consumers.send_signal(2)
        assert consumers.wait(10) == 0
    finally:
        consumers.kill()
        consumers.wait()
    assert re.fullmatch(r"order [0-9a-f]{8} of ann", printed[0])
    assert printed[1:] == ["packed book, try 1", "packed glass, try 2"]
    assert parked.headers["consumer-error"].startswith("guardian_consumers.Park: nobody can't pay")


def test_the_guide_lists_every_setting_with_its_default():
    said = dict(re.findall(r"^\| `RABBIT_([A-Z_]+)` \|([^|]*)\|", TEXT, re.MULTILINE))
    assert {f"RABBIT_{name}" for name in said} == Settings.variables()
    settings = settings_at("amqp://127.0.0.1", prefetch="growing")
    for name in ("GROWS_AFTER", "TIME_LIMIT", "HOLD_SECONDS", "PUBLISH_TIMEOUT"):
        assert float(said[name]) == getattr(settings, name.lower())
