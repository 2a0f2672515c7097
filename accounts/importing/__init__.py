"""Pulse users from elsewhere: adopted from the broker, or from PulseGuardian. Begin with ``adoption.py``.

A plan may raise ``BrokerError``. ``PlanOutdated`` and ``NotVouched`` say that the database changed since: plan again.
"""
