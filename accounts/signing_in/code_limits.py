"""How many sign-in codes are sent.

A low limit for a mailbox would let anybody keep its owner from signing in. So the low limits count a mailbox for each
client network. The limit for all networks together only bounds the mails to one mailbox.
"""

import hashlib

from django.http import HttpRequest

from accounts.allauth_private import client_network
from accounts.mailboxes import mailbox
from core.limits import RateLimit, consume

TO_MAILBOX_FROM_NETWORK = (RateLimit("sign-in codes", 3, 60), RateLimit("sign-in codes", 10, 3600))
FROM_NETWORK = (RateLimit("sign-in codes", 20, 60), RateLimit("sign-in codes", 200, 3600))
TO_MAILBOX = (RateLimit("sign-in codes", 100, 3600),)


def count_code(request: HttpRequest, address: str) -> None:
    """Count a code for an address in normal form, or raise RateLimitExceeded.

    A request that a network's limits refuse is not counted for the mailbox.
    """
    network = client_network(request)
    digest = hashlib.sha256(mailbox(address).encode()).hexdigest()
    for limits, client in (
        (TO_MAILBOX_FROM_NETWORK, f"{digest}:{network}"),
        (FROM_NETWORK, network),
        (TO_MAILBOX, digest),
    ):
        for limit in limits:
            consume(limit, client)
