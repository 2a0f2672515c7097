"""A mail server that stores mails instead of delivering them."""

import email
import email.policy
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.message import EmailMessage
from functools import cached_property
from typing import Any, Self, cast

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

from tools.processes import free_port

logging.getLogger("mail.log").setLevel(logging.WARNING)  # aiosmtpd logs every line of every session


@dataclass(frozen=True)
class Mail:
    """A received mail: the envelope and the unparsed content."""

    sender: str
    recipients: tuple[str, ...]
    content: bytes

    @cached_property
    def message(self) -> EmailMessage:
        """The mail, parsed on first use, since many may arrive at once."""
        return email.message_from_bytes(self.content, policy=email.policy.default)

    @property
    def subject(self) -> str:
        return str(self.message["Subject"])

    @property
    def text(self) -> str:
        return self._part("plain")

    @property
    def html(self) -> str:
        """The HTML part, or an empty string."""
        return self._part("html")

    def _part(self, kind: str) -> str:
        part = self.message.get_body((kind,))
        return "" if part is None else cast(str, cast(EmailMessage, part).get_content()).replace("\r\n", "\n")


class MailCatcher:
    """An SMTP server on a free port of this host. It is thread-safe.

    ``rejected`` is a set of recipients that it refuses permanently (550).
    """

    def __init__(
        self, *, on_mail: Callable[[Mail], None] | None = None, port: int | None = None, host: str = "127.0.0.1"
    ) -> None:
        """Choose the port without listening yet. The server's thread calls ``on_mail`` for each mail first."""
        self.host = host
        self.port = port or free_port()
        self.rejected: set[str] = set()
        self._on_mail = on_mail
        self._refusing = False
        self._mails: list[Mail] = []
        self._arrived = threading.Condition()
        self._controller: Controller | None = None

    @property
    def url(self) -> str:
        return f"smtp://{self.host}:{self.port}"

    def start(self) -> Self:
        """Start listening. After `stop`, the port and the mails are the same."""
        if self._controller is None:
            controller = Controller(self, hostname=self.host, port=self.port, enable_SMTPUTF8=True)
            controller.start()
            self._controller = controller
        return self

    def stop(self) -> None:
        if self._controller is not None:
            self._controller.stop()
            self._controller = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def refuse(self, refusing: bool) -> None:
        """Start or stop refusing every mail temporarily (451)."""
        self._refusing = refusing

    @property
    def mails(self) -> list[Mail]:
        with self._arrived:
            return list(self._mails)

    def to(self, address: str) -> list[Mail]:
        return [mail for mail in self.mails if address in mail.recipients]

    def clear(self) -> None:
        with self._arrived:
            self._mails.clear()

    def wait_for(self, wanted: Callable[[Mail], bool], timeout: float = 10) -> Mail:
        """Return the first wanted mail, waiting up to ``timeout`` seconds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while True:
                for mail in self._mails:
                    if wanted(mail):
                        return mail
                if not self._arrived.wait(deadline - time.monotonic()):
                    subjects = [mail.subject for mail in self._mails]
                    raise TimeoutError(f"no such mail within {timeout:.0f} s; there are: {subjects}")

    # aiosmtpd's hooks

    async def handle_MAIL(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self._refusing:
            return "451 Try again later"
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.rejected:
            return "550 No such mailbox"
        envelope.rcpt_tos.append(address)
        envelope.rcpt_options.extend(options)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Store the mail, or refuse it temporarily if ``on_mail`` can't, such as on a full disk."""
        content: Any = envelope.content
        mail = Mail(envelope.mail_from or "", tuple(envelope.rcpt_tos), content)
        if self._on_mail is not None:
            try:
                self._on_mail(mail)
            except OSError:
                return "452 Insufficient system storage"
        with self._arrived:
            self._mails.append(mail)
            self._arrived.notify_all()
        return "250 OK"
