"""A worker over HTTP with the callback of working.py, for the processes of test_work_store.py."""

import os

from guardian_store import HTTPTransport, Leases, Worker, ZooKeeper
from tests.support.working import handle

transport = HTTPTransport(os.environ["GUARDIAN"], "shop", key=os.environ["KEY"])
hosts = os.environ["ZOOKEEPER_HOSTS"]
sharing = ZooKeeper(hosts, 2) if hosts else Leases(2)
Worker("handle", handle, transport, sharing=sharing, batch=10).run_until_signal()
