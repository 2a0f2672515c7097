"""Pulse users from elsewhere: adopted from the broker, or from PulseGuardian. Begin with ``adoption.py``."""
