"""A proxy that decodes addresses stands between Guardian and the broker. A real nginx does."""

from urllib.parse import urlsplit

import pytest

from queues.guard import once
from queues.models import Queue
from rabbit.errors import AnotherVhost
from rabbit.management import Management
from status.doctor import examine, findings
from tests.conftest import Amqp
from tests.support.toolbox import queue_names, sent
from tools.nginx import PrivateNginx

pytestmark = pytest.mark.slow

TRAVERSING = "queue/ann/../../other/billing-orders"


@pytest.fixture(scope="module")
def rewriting(broker):
    """Return the broker's URL behind a proxy that decodes %2F and merges slashes."""
    url = urlsplit(broker.management_url)
    with PrivateNginx(f"location /rabbitmq/ {{ proxy_pass http://127.0.0.1:{url.port}/; }}") as nginx:
        credentials = url.netloc.rpartition("@")[0]
        yield f"http://{credentials}@127.0.0.1:{nginx.port}/rabbitmq"


@pytest.fixture
def traversing(broker, guarded, settings, amqp):
    """Guard the vhost "/", with a queue over its limit whose name leads elsewhere in an address."""
    settings.GUARDIAN_VHOSTS = settings.GUARDIAN_PULSE_VHOST = "/"
    settings.GUARDIAN_VHOSTS = ["/"]
    amqp.queue("billing-orders", 11)
    anns = Amqp(broker.amqp_url, "/")
    anns.queue(TRAVERSING, 11)
    yield anns
    anns.channel.queue_delete(TRAVERSING)
    anns.connection.close()


def test_no_queue_is_deleted_through_a_rewriting_proxy(traversing, rewriting, settings, management, vhost):
    settings.RABBITMQ_MANAGEMENT_URL = rewriting
    for _ in range(3):
        report = once.run_once()
        assert (report.away, report.deleted) == (True, 0)
    assert "a proxy before the broker decodes %2F" in report.errors[0]
    assert not Queue.objects.exists()
    assert queue_names(management, vhost) == {"billing-orders"}
    assert TRAVERSING in queue_names(management, "/")
    assert sent("ops@example.org") == ["outage"]


def test_only_the_queue_with_the_traversing_name_is_deleted(traversing, management, vhost):
    once.run_once()
    assert TRAVERSING not in queue_names(management, "/")
    assert queue_names(management, vhost) == {"billing-orders"}


def test_a_list_with_rows_of_another_vhost_is_malformed(traversing, rewriting):
    client = Management(rewriting)
    for request in (client.exchanges, client.bindings, lambda vhost: client.list_queues(vhost, {})):
        with pytest.raises(AnotherVhost):
            request("/")
    client.close()


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_the_doctor_recognises_a_rewriting_proxy(guarded, rewriting, settings, is_rewritten):
    if is_rewritten:
        settings.RABBITMQ_MANAGEMENT_URL = rewriting
    found = {finding.name: finding for finding in examine.examine()}
    assert ("broker address" in found) is is_rewritten
    if is_rewritten:
        assert found["broker address"].status is findings.Status.PROBLEM
