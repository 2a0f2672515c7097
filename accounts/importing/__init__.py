"""Pulse users from elsewhere: adopted from the broker, or from PulseGuardian. Begin with ``adoption.py``.

A plan may raise ``BrokerError``. If the database changed since, carrying it out fails: plan again.
"""
