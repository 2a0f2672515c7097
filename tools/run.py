"""``make run``: run Guardian on this machine, with the configured broker and mail server or private ones."""

import argparse
import os
import sys

from rich.console import Console
from rich.markup import escape

from tools.mail import Mail
from tools.processes import StartError, end_with_parent
from tools.stack import PROJECT, Stack, configured, turn_signals_into_interrupts

COLOURS = {"web": "cyan", "guard": "yellow", "deleter": "bright_yellow", "worker": "green", "beat": "blue"}

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(f"[bold]guardian[/] {escape(text)}")


def show(name: str, line: str) -> None:
    console.print(f"[{COLOURS.get(name.partition('-')[0], 'white')}]{name:>8}[/] {escape(line)}")


def show_mail(mail: Mail) -> None:
    console.print(f"[magenta]    mail[/] to {escape(', '.join(mail.recipients))}: {escape(mail.subject)}")


def main() -> int:
    """Run until Ctrl-C. Return 1 if something did not start, or RabbitMQ ended."""
    parser = argparse.ArgumentParser(prog="python -m tools.run", description="Run Guardian on this machine.")
    parser.add_argument(
        "--web", type=int, choices=range(1, 10), default=1, metavar="N", help="web processes, each on its own port"
    )
    parser.add_argument(
        "--workers", type=int, choices=range(1, 10), default=1, metavar="N", help="workers of each kind"
    )
    options = parser.parse_args()
    if "MAKELEVEL" in os.environ:  # make forwards no signal
        end_with_parent()
    turn_signals_into_interrupts()
    try:
        with Stack(
            configured(),
            var=PROJECT / "var",
            say=say,
            show=show,
            on_mail=show_mail,
            web=options.web,
            workers=options.workers,
        ) as stack:
            stack.prepare()
            stack.start()
            for name, address in stack.addresses.items() if options.web > 1 else ():
                say(f"{name} is at {address}")
            say(f"Guardian is at {stack.base_url}. Ctrl-C stops it and everything that it started.")
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
