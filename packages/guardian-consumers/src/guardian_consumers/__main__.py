"""``python -m guardian_consumers MODULE:FUNCTION …``: consume, in Django if DJANGO_SETTINGS_MODULE is set."""

import logging
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from guardian_consumers._command import (
    EXIT_CODES,
    INVALID_SETTING,
    add_arguments,
    consume,
    consume_in_django,
    set_up_django,
)
from guardian_consumers._errors import SettingsError


def main(prog: str = "python -m guardian_consumers") -> int:
    parser = ArgumentParser(prog=prog, description="Consume messages.", epilog=EXIT_CODES)
    add_arguments(parser)
    options = vars(parser.parse_args())
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(message)s")
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        return consume(options, os.environ, _report)
    try:
        set_up_django()
    except SettingsError as error:
        _report(str(error))
        return INVALID_SETTING
    return consume_in_django(options, _report)


def script() -> int:
    """Run the command ``consume``. It finds modules in the current folder, as ``python -m`` does."""
    sys.path.insert(0, str(Path.cwd()))
    return main("consume")


def _report(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
