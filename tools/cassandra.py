"""Private Apache Cassandra nodes, which leave no files behind. ``make cassandra`` installs what they need."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson
from cassandra import ProtocolVersion
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.policies import WhiteListRoundRobinPolicy

from tools.processes import StartError, free_port, spawn
from tools.server import PrivateServer

JARS = Path(__file__).resolve().parent.parent / "var" / "cassandra"

HEAP = "512m"

DATACENTER = "datacenter1"
"""The data centre of all nodes."""

USER = PASSWORD = "cassandra"
"""The first user of every Cassandra."""

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")

MAX_BATCH = "4MiB"
"""The size of a batch over several partitions from which a node refuses it. Cassandra's default is 50 KiB."""

_EXPORTS = (
    "java.base/jdk.internal.misc", "java.base/jdk.internal.ref", "java.base/sun.nio.ch",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi", "java.rmi/sun.rmi.registry", "java.rmi/sun.rmi.server",
    "java.sql/java.sql", "jdk.unsupported/sun.misc",
)  # fmt: skip
_OPENS = (
    "java.base/java.io", "java.base/java.lang", "java.base/java.lang.module", "java.base/java.lang.reflect",
    "java.base/java.math", "java.base/java.net", "java.base/java.nio", "java.base/java.util",
    "java.base/java.util.concurrent", "java.base/java.util.concurrent.atomic", "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math", "java.base/jdk.internal.module", "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect", "java.base/jdk.internal.util.jar", "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
)  # fmt: skip
"""The parts of Java that Cassandra uses, though they are private: from its ``jvm17-server.options``."""

_LOGGING = """<configuration>
  <appender name="STDOUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %d{HH:mm:ss.SSS} [%thread] %logger{0}: %msg%n%ex{5}</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="STDOUT"/></root>
</configuration>
"""


_STATES = "SELECT status_with_port FROM system_views.gossip_info"
"""The states of all nodes that a node knows. One that joins has none of the data, but counts in a quorum."""


class NotReady(Exception):
    """The node doesn't answer yet."""


class PrivateCassandra(PrivateServer):
    """One private node, not crash-safe. Data survives `halt`, and up to ten seconds of it are lost with `kill`.

    It requires USER and PASSWORD. The nodes of a `PrivateRing` require no credentials, and have an address each.
    """

    name = "Cassandra"
    not_ready = NotReady

    def __init__(
        self,
        *,
        address: str = ADDRESSES[0],
        seed: str | None = None,
        ports: tuple[int, int] | None = None,
        is_fast_to_start: bool = True,
        copies_data: bool = False,
        disk: Path | None = None,
        command: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose ports and directory. Raises StartError if Cassandra or Java isn't installed.

        ``seed`` is the address of the first node of a ring. ``ports`` are those for clients and for other nodes.
        ``is_fast_to_start``: start in half of the time and answer at half of the rate. ``copies_data``: when the node
        joins a ring, it copies the data of the others first. ``disk`` is where the data goes, by default the node's
        directory. ``command`` runs the node, such as ``env``. ``settings`` override those below, and None removes one.
        """
        java = next(Path("/usr/lib/jvm").glob("java-17-*/bin/java"), None)
        if java is None or not (JARS / "installed").exists():
            missing = "Java 17" if java is None else JARS / "installed"
            raise StartError(f"Cassandra is not installed: there is no {missing}. Run `make cassandra`.")
        super().__init__()
        self._java = java
        self._command = command
        self.address = address
        self._requires_credentials = seed is None
        self._is_fast_to_start = is_fast_to_start
        self._copies_data = copies_data
        self.port, storage_port = ports or (self.port, free_port())
        names = ("data", "commitlog", "saved_caches", "hints", "cdc_raw")
        data, commitlog, caches, hints, changes = (str((disk or self.directory) / name) for name in names)
        written: dict[str, Any] = {
            "cluster_name": "guardian",
            "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
            "num_tokens": 4,
            "data_file_directories": [data],
            "commitlog_directory": commitlog,
            "saved_caches_directory": caches,
            "hints_directory": hints,
            "cdc_raw_directory": changes,
            "commitlog_sync": "periodic",
            "commitlog_sync_period": "10000ms",
            "commitlog_segment_size": "32MiB",
            "commitlog_total_space": "256MiB",
            "memtable_heap_space": "96MiB",
            "memtable_offheap_space": "96MiB",
            "file_cache_size": "32MiB",
            "key_cache_size": "8MiB",
            "concurrent_reads": 8,
            "concurrent_writes": 8,
            "endpoint_snitch": "SimpleSnitch",
            "seed_provider": [
                {
                    "class_name": "org.apache.cassandra.locator.SimpleSeedProvider",
                    "parameters": [{"seeds": f"{seed or address}:{storage_port}"}],
                }
            ],
            "listen_address": address,
            "rpc_address": address,
            "native_transport_port": self.port,
            "storage_port": storage_port,
            "auto_bootstrap": copies_data,
            "auto_snapshot": False,
            "batch_size_warn_threshold": MAX_BATCH,
            "batch_size_fail_threshold": MAX_BATCH,
        }
        if self._requires_credentials:
            written |= {"authenticator": "PasswordAuthenticator", "authorizer": "CassandraAuthorizer"}
        written = {name: value for name, value in {**written, **(settings or {})}.items() if value is not None}
        (self.directory / "cassandra.yaml").write_bytes(orjson.dumps(written))  # JSON is YAML
        (self.directory / "logback.xml").write_text(_LOGGING)

    @property
    def hosts(self) -> str:
        return f"{self.address}:{self.port}"

    def _launch(self, output: BinaryIO) -> "subprocess.Popen[bytes]":
        (agent,) = JARS.glob("jamm-*.jar")
        properties = {
            "cassandra.config": f"file://{self.directory}/cassandra.yaml",
            "cassandra.storagedir": self.directory,
            "cassandra-foreground": "yes",
            "cassandra.superuser_setup_delay_ms": 0,
            "jdk.attach.allowAttachSelf": "true",
            "logback.configurationFile": self.directory / "logback.xml",
            "java.io.tmpdir": self.directory,
        }
        if not self._copies_data:  # what a node copies, it must have learnt of before
            properties |= {
                "cassandra.skip_wait_for_gossip_to_settle": 0,
                "cassandra.ring_delay_ms": 0 if self._requires_credentials else 1000,
                "cassandra.allow_unsafe_join": "true",
            }
        return spawn(
            [
                *self._command,
                self._java,
                *(f"-Xms{HEAP}", f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-Xss256k", "-XX:+ExitOnOutOfMemoryError"),
                *(["-XX:TieredStopAtLevel=1"] if self._is_fast_to_start else []),
                f"-javaagent:{agent}",
                *(part for name in _EXPORTS for part in ("--add-exports", f"{name}=ALL-UNNAMED")),
                *(part for name in _OPENS for part in ("--add-opens", f"{name}=ALL-UNNAMED")),
                *(f"-D{name}={value}" for name, value in properties.items()),
                *("-cp", f"{JARS}/*", "org.apache.cassandra.service.CassandraDaemon"),
            ],
            environment={"LANG": "C.UTF-8", "PATH": os.environ.get("PATH", os.defpath)},
            directory=self.directory,
            output=output,
        )

    def _check_ready(self) -> None:
        try:
            socket.create_connection((self.address, self.port), timeout=1).close()
            with self.connect():
                pass
        except (OSError, NoHostAvailable) as error:
            raise NotReady(str(error)) from error

    @contextmanager
    def connect(self) -> Iterator[Session]:
        policy = WhiteListRoundRobinPolicy([self.address])
        profile = ExecutionProfile(load_balancing_policy=policy, request_timeout=30)
        cluster = Cluster(
            [self.address],
            port=self.port,
            auth_provider=PlainTextAuthProvider(USER, PASSWORD) if self._requires_credentials else None,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            protocol_version=ProtocolVersion.V5,
        )
        try:
            yield cluster.connect()
        finally:
            cluster.shutdown()

    def pause(self) -> None:
        """Suspend the node: it accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a suspended node."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class PrivateRing:
    """Three nodes of one data centre, with the same ports, by default on 127.0.0.1 to 127.0.0.3."""

    def __init__(self, nodes: Sequence[PrivateCassandra] = (), *, copies_data: bool = False) -> None:
        """Choose ports and directories. Raises StartError if Cassandra or Java isn't installed.

        ``copies_data``: nodes that join copy the data of those that run.
        """
        ports = free_port(), free_port()
        self.nodes = nodes or [
            PrivateCassandra(
                address=address, seed=ADDRESSES[0], ports=ports, is_fast_to_start=False, copies_data=copies_data
            )
            for address in ADDRESSES
        ]

    @property
    def hosts(self) -> str:
        return ",".join(node.hosts for node in self.nodes)

    def start(self, timeout: float = 120) -> Self:
        """Start one node after the other, except those that run, and wait until each knows the others.

        Two that join together may choose the same tokens. Raises StartError after ``timeout`` seconds for one of them.
        """
        with ExitStack() as stack:
            stack.callback(self.stop)
            for node in self.nodes:
                if not node.running:
                    node.start(timeout)
            for node in self.nodes:
                self._wait_for_others(node, time.monotonic() + timeout)
            stack.pop_all()
        return self

    def _wait_for_others(self, node: PrivateCassandra, until: float) -> None:
        with node.connect() as session:
            while [str(row[0]).startswith("NORMAL") for row in session.execute(_STATES)].count(True) < len(self.nodes):
                if time.monotonic() > until:
                    raise StartError(f"The Cassandra node {node.address} doesn't find the others.")
                time.sleep(0.1)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
