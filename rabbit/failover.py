"""HTTP requests to the first address of a broker that answers."""

from collections.abc import Iterator, Mapping
from copy import copy

import orjson

from rabbit import deadline
from rabbit.addresses import addresses_of, split_addresses
from rabbit.http import Answer, NoAnswer, PooledClient, TooLarge
from rabbit.urls import read_server

UNAUTHORIZED = 401

CLUSTER_ID = "internal_cluster_id"
"""The broker's global parameter with an id that only the nodes of one cluster share."""


class FailoverClient:
    """An HTTP client of one broker at one or several addresses, for many threads.

    ``setting`` has the addresses, each of this ``form``. The timeouts are those of ``PooledClient``.
    """

    def __init__(self, setting: str, form: str, read_timeout: float, answer_timeout: float) -> None:
        self._addresses = addresses_of(setting)
        self._servers = {address: read_server(address, form) for address in split_addresses(setting) or [setting]}
        self._clients = {
            address: PooledClient(server.base, server.credentials, read_timeout, answer_timeout)
            for address, server in self._servers.items()
        }
        self._only: str | None = None

    @property
    def where(self) -> str:
        return ", ".join(self._servers[address].base for address in self._in_turn())

    def __len__(self) -> int:
        return len(self._servers)

    def at(self, address: str) -> "FailoverClient":
        """Return a client of this address alone."""
        one = copy(self)
        one._only = address
        return one

    def in_turn(self) -> Iterator["FailoverClient"]:
        """Yield a client of each address alone. Asking for the next one means that the last one failed."""
        for address in self._in_turn():
            yield self.at(address)
            self._addresses.move_past(address)

    def send(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send an idempotent request to the first address that can be reached and accepts the login.

        Raises NoAnswer if no address can be reached or an answer timed out, and TooLarge.
        """
        failures: list[NoAnswer] = []
        refusal: Answer | None = None
        for address in self._in_turn():
            if failures and deadline.seconds_left(1.0) <= 0:  # so the next request begins at this address
                break
            try:
                self._check_cluster(address)
                answer = self._send(address, method, target, body, headers)
            except NoAnswer as error:
                failures.append(error)
                self.move_past(address)
                if error.timed_out:
                    break
            else:
                may_be_second = any(not failure.never_reached for failure in failures)
                answer = answer._replace(address=address)
                if answer.status != UNAUTHORIZED:
                    return answer._replace(sent_twice=True) if may_be_second else answer
                refusal = answer
                self.move_past(address)
        if refusal is not None:
            return refusal
        raise _all_failed(failures)

    def cluster_ids(self) -> dict[str, str]:
        """Return the id of the cluster at each address. It is empty without an answer."""
        ids = {}
        for address in self._in_turn():
            try:
                ids[address] = self._cluster_id(address)
            except (NoAnswer, TooLarge):
                ids[address] = ""
        return ids

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _in_turn(self) -> list[str]:
        return self._addresses.in_turn() if self._only is None else [self._only]

    def move_past(self, address: str) -> None:
        if self._only is None:
            self._addresses.move_past(address)

    def _send(
        self, address: str, method: str, target: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> Answer:
        server = self._servers[address]
        try:
            return self._clients[address].send(method, f"{server.path}{target}", body, headers)
        except NoAnswer as error:
            if len(self._addresses) == 1 or server.base in str(error):
                raise
            text = f"{server.base}: {error}"
            raise NoAnswer(text, timed_out=error.timed_out, never_reached=error.never_reached) from error

    def _check_cluster(self, address: str) -> None:
        """Check, before the first use of one of several addresses, that it leads to the same cluster as the others."""
        if not self._addresses.needs_cluster(address):
            return
        if conflict := self._addresses.conflict(address, self._cluster_id(address)):
            raise NoAnswer(conflict, never_reached=True, is_another_cluster=True)

    def _cluster_id(self, address: str) -> str:
        """Return the id of the cluster at an address. It is empty for another answer, such as a refusal."""
        answer = self._send(address, "GET", f"/api/global-parameters/{CLUSTER_ID}", None, None)
        try:
            return str(orjson.loads(answer.body)["value"]) if answer.status == 200 else ""
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return ""


def _all_failed(failures: list[NoAnswer]) -> NoAnswer:
    return NoAnswer(
        "; ".join(dict.fromkeys(map(str, failures))),
        timed_out=failures[-1].timed_out,
        never_reached=all(failure.never_reached for failure in failures),
        is_another_cluster=any(failure.is_another_cluster for failure in failures),
    )
