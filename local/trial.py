"""What `make restarts` and `make soak` have in common: Guardian as in production, to be mistreated, and a verdict."""

import argparse
import io
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import django
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from local.load import Failed
from local.postgresql import PrivateCluster
from local.processes import StartError, end_with_parent
from local.redis import PrivateRedis
from local.stack import Stack, documented_defaults, turn_signals_into_interrupts
from rabbit.management import BrokerError, Management

OPERATOR = "ops@example.org"
Say = Callable[[str], None]


@dataclass
class Finding:
    """One line of the table: what was looked at, the figures, and what is wrong."""

    what: str
    figures: str
    wrong: list[str] = field(default_factory=list)


class Production:
    """Guardian as it runs in production, on a PostgreSQL, a Redis, a RabbitMQ and a mail server, all of its own.

    There are two web processes, two guards, two workers and beat. This program becomes Guardian too: it may use
    Guardian's own functions and rows. Use it in a ``with``, once in a program.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str], show: Callable[[str, str], None]) -> None:
        """Choose; nothing runs yet.

        ``settings`` are those that differ from the defaults. ``show(name, line)`` is told what each process writes.
        """
        self._directory = directory
        self._settings = settings
        self._show = show
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Start it all; raises StartError where something doesn't start."""
        with ExitStack() as exits:
            self.cluster = exits.enter_context(PrivateCluster())
            self.redis = exits.enter_context(PrivateRedis())
            self.stack = exits.enter_context(
                Stack(
                    self._environment(),
                    var=self._directory,
                    say=lambda text: None,
                    show=self._show,
                    fresh=True,
                    web=2,
                    workers=2,
                )
            )
            self.stack.prepare()
            assert self.stack.node is not None
            assert self.stack.mail is not None
            self.node, self.mail = self.stack.node, self.stack.mail
            self.management = exits.enter_context(closing(Management(self.node.management_url)))
            _become_guardian(self.stack.environment)
            self.stack.start()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.close()

    def _environment(self) -> dict[str, str]:
        return {
            **documented_defaults(),
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "DATABASE_URL": self.cluster.create_database("guardian"),
            "CELERY_BROKER_URL": self.redis.url,
            "EMAIL_URL": "",
            "GUARDIAN_IGNORED_QUEUES": "",
            "GUARDIAN_VHOSTS": "",
            "GUARDIAN_OPERATOR_EMAILS": OPERATOR,
            "GUARDIAN_POLL_SECONDS": "0.7",  # with 1, as long as a worker waits for Redis at a time, one gets them all
            "GUARDIAN_POLL_MAX_SECONDS": "5",
            "GUARDIAN_DELETE_BRAKE": "10000",  # what piles up while passes pause is not to be held
            **self._settings,
        }


def _become_guardian(environment: Mapping[str, str]) -> None:
    os.environ.update(environment, DJANGO_SETTINGS_MODULE="guardian_site.settings", LOG_LEVEL="WARNING")
    django.setup()


def command(*arguments: str) -> str:
    """Run a command of ``manage.py`` in this program, and give what it prints."""
    from django.core.management import call_command

    output = io.StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue().strip()


def last_pass() -> Any:
    """Give the id of the last pass on record; None: there is none."""
    from queues.models import Pass

    return Pass.objects.order_by("-at").values_list("id", flat=True).first()


def await_pass(timeout: float = 150) -> None:
    """Return when a pass that began just now has found nothing wrong; raises StartError past ``timeout`` seconds."""
    from django.utils import timezone

    from queues.models import Pass

    now = timezone.now()
    if not happens(lambda: Pass.objects.filter(at__gt=now, errors=[]).exists(), timeout):
        raise StartError(f"there was no pass without an error for {timeout:.0f} s")


def happens(what: Callable[[], bool], timeout: float, every: float = 0.1) -> bool:
    """Return whether something happens within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def give_free_what_nobody_holds(seconds: float) -> None:
    """Let leases, claims and holds run out that nothing was done with for so many seconds.

    That is far longer than anything takes here. Otherwise a name that a killed process held stays held for 100 seconds,
    and whoever needs it then is right to ask for patience.
    """
    from django.core.cache import cache
    from django.utils import timezone

    from queues import outbox
    from queues.models import Lease, Notification

    leases = list(Lease.objects.exclude(holder=None).values_list("name", "holder", "expires_at"))
    claims = list(Notification.objects.filter(state="sending").values_list("id", "claim"))
    holds = _holds()
    if not leases and not claims and not holds:
        return
    time.sleep(seconds)
    for name, holder, expires_at in leases:
        same = Lease.objects.filter(name=name, holder=holder, expires_at=expires_at)
        same.update(expires_at=timezone.now() - timedelta(seconds=1))
    freed = 0
    for id_, claim in claims:
        same_claim = Notification.objects.filter(id=id_, claim=claim, state="sending")
        freed += same_claim.update(due_at=timezone.now())
    for key, _, _ in holds & _holds():
        cache.delete(key)  # its holder didn't renew it, and didn't give it back either
    if freed:
        outbox.nudge()


def _holds() -> set[tuple[str, str, str]]:
    """Give the name, the value and the end of each hold on record: Django's cache can't be asked for its names."""
    from django.conf import settings
    from django.core.cache import cache
    from django.db import connection

    from accounts.hold import PREFIX

    table = connection.ops.quote_name(str(settings.CACHES["default"]["LOCATION"]))
    key = cache.make_key("")
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT cache_key, value, expires FROM {table} WHERE cache_key LIKE %s",
            [f"{key}{PREFIX}%"],
        )
        return {(name.removeprefix(key), value, str(expires)) for name, value, expires in cursor.fetchall()}


def sweep(*, patience: bool) -> list[str]:
    """Sweep once, with every registration old enough to be looked at, and give what the sweep complains of.

    Younger ones may be under way. With ``patience`` they are waited for, otherwise they are made older.
    """
    from django.db.models import F
    from django.utils import timezone

    from local.invariants import REGISTERED
    from queues.orphans import UNDER_WAY, sweep_orphans

    if patience:
        time.sleep(UNDER_WAY.total_seconds())
    else:
        for model in REGISTERED:
            model._default_manager.filter(created__gt=timezone.now() - UNDER_WAY).update(
                created=F("created") - UNDER_WAY
            )
    return [f"the sweep said: {error}" for error in sweep_orphans().errors]


def hold(
    parser: argparse.ArgumentParser, do: Callable[[argparse.Namespace, int, Path, Say], list[Finding]], well: str
) -> int:
    """Hold a trial: print what it says and its table, and give the exit code.

    That is 1 where something is not as it should be, 2 without a result. ``do`` gets what was asked for, the seed, and
    the directory for logs and data; ``well`` is said where nothing is wrong.
    """
    parser.add_argument("--seed", type=int, help="of what is left to chance; by default another each time")
    parser.add_argument("--directory", type=Path, help="where the logs are kept; by default they are where it fails")
    wanted = parser.parse_args()
    if "MAKELEVEL" in os.environ:  # make has nobody else to end
        end_with_parent()
    turn_signals_into_interrupts()
    seed = secrets.randbelow(1_000_000) if wanted.seed is None else wanted.seed
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {escape(text)}")
        sys.stdout.flush()

    directory = wanted.directory or Path(tempfile.mkdtemp(prefix=f"guardian-{parser.prog.rpartition('.')[2]}-"))
    say(f"The seed is {seed}: with SEED={seed}, what is left to chance comes out the same.")
    kept = True
    try:
        findings = do(wanted, seed, directory, say)
        kept = any(finding.wrong for finding in findings)
    except KeyboardInterrupt:
        kept = False
        return 130
    except (StartError, BrokerError, Failed) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    finally:
        if kept or wanted.directory:
            say(f"What the processes said is in {directory / 'log'}.")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    _show(console, findings)
    say(f"Something is not as it should be (seed {seed})." if kept else well)
    return int(kept)


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(show_lines=False)
    for column in ("", "what", "figures"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row("wrong" if finding.wrong else "ok", finding.what, finding.figures)
    console.print(table)
    for finding in findings:
        for wrong in finding.wrong[:20]:
            console.print(f"{finding.what}: {wrong}", style="red", markup=False, soft_wrap=True)
