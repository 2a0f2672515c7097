"""What happens to Pulse users: created, owned, removed. Begin with ``creation.py``.

Every change may raise these errors: ``PulseUser.DoesNotExist`` if the Pulse user no longer exists or ``by`` no longer
owns it; ``BrokerError`` if the broker is unreachable or refuses; ``NotVouched`` if a future owner may not use the
broker; ``PermissionDenied`` if only operators may do it; and ``ValidationError`` for an invalid value (``NameRefused``:
the name) or a reached quota. The text says why. The docstrings name further errors.
"""
