"""``make run``: Guardian on this machine, with the broker and the mail server that are configured, or with its own."""

import argparse
import os
import sys

from rich.console import Console
from rich.markup import escape

from tools.mail import Mail
from tools.processes import StartError, end_with_parent
from tools.stack import PROJECT, Stack, configured, turn_signals_into_interrupts

COLOURS = {"web": "cyan", "guard": "yellow", "worker": "green", "beat": "blue"}

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line of our own."""
    console.print(f"[bold]guardian[/] {escape(text)}")


def show(name: str, line: str) -> None:
    """Print a line that one of the processes wrote."""
    console.print(f"[{COLOURS[name.partition('-')[0]]}]{name:>8}[/] {escape(line)}")


def show_mail(mail: Mail) -> None:
    """Print a line for a mail."""
    console.print(f"[magenta]    mail[/] to {escape(', '.join(mail.recipients))}: {escape(mail.subject)}")


def main() -> int:
    """Run until Ctrl-C; gives 1 when something didn't start, or ended by itself."""
    parser = argparse.ArgumentParser(prog="python -m tools.run", description="Run Guardian on this machine.")
    parser.add_argument(
        "--web", type=int, choices=range(1, 10), default=1, metavar="N", help="web processes, each on a port of its own"
    )
    parser.add_argument(
        "--workers", type=int, choices=range(1, 10), default=1, metavar="N", help="workers of each kind"
    )
    wanted = parser.parse_args()
    if "MAKELEVEL" in os.environ:  # make has nobody else to end
        end_with_parent()
    turn_signals_into_interrupts()
    try:
        with Stack(
            configured(),
            var=PROJECT / "var",
            say=say,
            show=show,
            on_mail=show_mail,
            web=wanted.web,
            workers=wanted.workers,
        ) as stack:
            stack.prepare()
            stack.start()
            for name, address in stack.addresses.items() if wanted.web > 1 else ():
                say(f"{name} is at {address}")
            say(f"Guardian is at {stack.base_url}. Ctrl-C ends it and everything that it started.")
            stack.wait()
    except KeyboardInterrupt:
        say("Stopped.")
        return 0
    except StartError as error:
        console.print(f"[bold red]guardian[/] {escape(str(error))}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
