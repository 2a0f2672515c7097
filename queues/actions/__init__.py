"""What people do to queues: delete, purge, set limits, release. Begin with ``single.py``.

An action may raise these errors: ``PermissionDenied`` if ``by`` may not do it (only operators set limits, release, and
delete what an agent registered); ``ConfirmationRequired`` if ``confirm`` does not confirm its effect, and then nothing
was changed; ``Gone`` if the broker does not list the thing; ``ValidationError`` for a value; and ``BrokerError`` if the
broker is unreachable or refuses. The docstrings name further errors.
"""
