"""What a registration creates: rows, queues, logins. Begin with ``queues.py``.

Every registration may raise these errors: ``NotVouched``, or a ``ValidationError`` for a reached quota
(``GUARDIAN_MAX_SUBSCRIPTIONS`` rows of one model), only if it would create a row; ``PermissionDenied`` if the token
was revoked; ``ObjectDoesNotExist`` if a row that it needs was removed; ``Refusal`` for an invalid value; ``Busy`` after
several deadlocks or while another request changes the same login, queue or vhost; and ``BrokerError`` if the broker is
unreachable or refuses. Then nothing new is registered.
"""
