"""What happens to Pulse users: created, owned, removed. Begin with ``creation.py``.

Every change may raise these errors: ``PulseUser.DoesNotExist`` if the Pulse user no longer exists or ``by`` no longer
owns it; ``BrokerError`` if the broker is unreachable or refuses; ``NotVouched`` if a future owner may not use the
broker; ``LastOwner`` if no owner who can sign in would remain; ``QuotaReached``; and ``ValidationError`` for an invalid
value, by field if there are several. The docstrings name further errors.
"""
