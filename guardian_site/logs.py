import logging
import re

_LINK = re.compile(r"(/signin/link/|/addresses/)[^/\s]+")


class WithoutSecrets(logging.Filter):
    """Takes what is secret out of the addresses that Django logs: who has such a link can use it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, the end of its link left out."""
        record.msg = _LINK.sub(r"\1…", str(record.msg))
        if isinstance(record.args, tuple):
            record.args = tuple(_LINK.sub(r"\1…", value) if isinstance(value, str) else value for value in record.args)
        return True
