"""What ``doctor`` checks of mail, the message store and the sign-in provider."""

import smtplib
from contextlib import closing
from email.utils import parseaddr
from typing import Any

from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from django.conf import settings
from django.core.mail import get_connection
from requests import RequestException

from accounts.signing_in import openid_connect
from core.masking import text_of
from message_store.cassandra.settings import replication
from message_store.store import StoreUnavailable, store
from status import facts, rules
from status.doctor.findings import Finding, Findings, Status, finding_of

FIRST_REFUSAL = 400
"""SMTP's codes below are consents."""

# Mail


def check_mail_server() -> Findings:
    """Connect to the mail server, sign in, and begin a mail to an operator, which is not sent."""
    if not settings.EMAIL_BACKEND.endswith("smtp.EmailBackend"):
        found = f"no mail server is set; mails go to {settings.EMAIL_BACKEND.split('.')[-2]}"
        status = Status.OK if settings.DEBUG else Status.WARNING
        advice = "" if settings.DEBUG else "Set EMAIL_URL: without it nobody is notified."
        yield Finding("mail server", status, found, advice)
        return
    where = f"{settings.EMAIL_HOST}, port {settings.EMAIL_PORT}"
    sender = parseaddr(settings.DEFAULT_FROM_EMAIL)[1]
    recipient = next(iter(settings.GUARDIAN_OPERATOR_EMAILS), sender)
    try:
        server: Any = get_connection(timeout=5)
        server.open()
        with closing(server):
            begun = facts.attempt(
                rules.MAIL_SERVER,
                lambda: _begin_mail(server.connection, sender, recipient),
                where=where, sender=sender, recipient=recipient,
            )  # fmt: skip
    except smtplib.SMTPAuthenticationError as error:
        found = f"{where}: it refuses the account ({error.smtp_code})"
        yield Finding("mail server", Status.PROBLEM, found, "Check the account and the password in EMAIL_URL.")
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        advice = "Check that it runs, and EMAIL_URL. Guardian keeps mails and tries to send them for a day."
        yield Finding("mail server", Status.PROBLEM, f"{where}: {text_of(error) or 'no answer in time'}", advice)
    else:
        if begun.verdict.is_wrong:
            yield finding_of(begun.verdict)
            return
        login = "and accepts the account" if settings.EMAIL_HOST_USER else "without an account"
        yield Finding("mail server", Status.OK, f"{where} answers, {login}")


def _begin_mail(connection: smtplib.SMTP, sender: str, recipient: str) -> None:
    """Name sender and recipient as for a mail, and take it back. Many servers judge the sender after the recipient."""
    connection.ehlo_or_helo_if_needed()
    for name, address in ((connection.mail, sender), (connection.rcpt, recipient)):
        code, reply = name(address)
        if code >= FIRST_REFUSAL:
            raise smtplib.SMTPException(f"{code} {reply.decode(errors='replace')}")
    connection.rset()


# The message store


def check_message_store() -> Findings:
    name = "message store"
    if settings.MESSAGE_STORE != "cassandra":
        return
    try:
        # The import takes a while, and most installations don't need it.
        from message_store.cassandra.checkup import examine

        cluster = examine(wait=2)
    except StoreUnavailable as error:
        advice = "Start the cluster, or check the settings that begin with CASSANDRA_. Until then requests get 503."
        yield Finding(name, Status.PROBLEM, str(error), advice)
        return
    nodes = f"Cassandra {cluster.version}, {cluster.up} of {cluster.up + len(cluster.down)} nodes answer"
    if cluster.down:
        advice = f"Start {', '.join(cluster.down)}. After more than a day without a node, repair it first."
        yield Finding(name, Status.WARNING, nodes, advice)
    else:
        yield Finding(name, Status.OK, nodes)
    wanted, actual = replication(), cluster.replication
    if actual != wanted:
        found = f"the keyspace {settings.CASSANDRA_KEYSPACE} has the replicas {actual}, CASSANDRA_REPLICATION {wanted}"
        yield Finding(name, Status.PROBLEM, found, "Run manage.py message_store_schema, which says what to do.")
    delay = store().delay
    found = f"the clocks of the nodes differ by {cluster.clock_difference:.3f} s"
    if delay and cluster.clock_difference > delay / 3:
        advice = f"Synchronize them by NTP. Above {delay / 3:.1f} s, a third of the delay, readers may miss messages."
        yield Finding(name, Status.PROBLEM, found, advice)
    else:
        yield Finding(name, Status.OK, found)


# Single sign-on


def check_single_sign_on() -> Findings:
    if not settings.OIDC_ISSUER:
        return
    try:
        openid_connect.check_provider()
    except (RequestException, OAuth2Error) as error:
        advice = "Check OIDC_ISSUER, and that it answers. Until then people sign in by a code."
        yield Finding("single sign-on", Status.PROBLEM, f"{settings.OIDC_ISSUER} can't be used: {error}", advice)
    else:
        yield Finding("single sign-on", Status.OK, f"{settings.OIDC_ISSUER} answers")
