"""Examine an installation: run all checks of ``doctor`` at once."""

import threading
import time
from collections.abc import Callable

from django.db import connection

from core.masking import text_of
from status.doctor.addresses import check_addresses, check_amqp
from status.doctor.broker import check_broker, check_broker_clock
from status.doctor.database import check_database, check_task_queue
from status.doctor.findings import (
    TIMEOUT_SECONDS,
    Finding,
    Findings,
    Status,
    with_certificate_advice,
    without_passwords,
)
from status.doctor.services import check_mail_server, check_message_store, check_single_sign_on
from status.doctor.settings import check_settings


def examine() -> list[Finding]:
    """Run all checks, and return their findings. Raise no errors."""
    parts = (
        ("settings", check_settings),
        ("database", check_database),
        ("task queue", check_task_queue),
        ("broker", check_broker),
        ("broker over AMQP", check_amqp),
        ("broker addresses", check_addresses),
        ("broker clock", check_broker_clock),
        ("message store", check_message_store),
        ("mail server", check_mail_server),
        ("single sign-on", check_single_sign_on),
    )
    checks = [_Check(name, check) for name, check in parts]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for check in checks:
        check.start()
    found = [finding for check in checks for finding in check.found_by(deadline)]
    return [without_passwords(with_certificate_advice(finding)) for finding in found]


class _Check(threading.Thread):
    """Checks one part. If it takes too long, it is abandoned."""

    def __init__(self, part: str, check: Callable[[], Findings]) -> None:
        super().__init__(daemon=True)
        self._part = part
        self._check = check
        self._found: list[Finding] = []

    def run(self) -> None:
        try:
            for finding in self._check():
                self._found.append(finding)
        except Exception as error:  # one failed check must not hide the findings of others
            found = f"the check failed: {type(error).__name__}: {text_of(error)}"
            advice = "Look at the other findings first; one of them may be the cause."
            self._found.append(Finding(self._part, Status.PROBLEM, found, advice))
        finally:
            connection.close()

    def found_by(self, deadline: float) -> list[Finding]:
        """Return the findings until the deadline, with another one if the check has not finished."""
        self.join(max(deadline - time.monotonic(), 0))
        found = list(self._found)
        if self.is_alive():
            advice = "Check that it runs, and that no firewall blocks it."
            found.append(Finding(self._part, Status.PROBLEM, f"no answer within {TIMEOUT_SECONDS:g} s", advice))
        return found
