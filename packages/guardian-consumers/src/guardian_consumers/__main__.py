"""``python -m guardian_consumers MODULE:FUNCTION …``: consume without Django."""

import logging
import os
import sys
from argparse import ArgumentParser

from guardian_consumers.command import EXIT_CODES, add_arguments, consume


def main() -> int:
    parser = ArgumentParser(prog="python -m guardian_consumers", description="Consume messages.", epilog=EXIT_CODES)
    add_arguments(parser)
    options = vars(parser.parse_args())
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(message)s")
    return consume(options, os.environ, lambda text: print(text, file=sys.stderr))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
