"""Functions that several test modules use. Shared fixtures are in fixtures.py."""


class Killed(BaseException):
    """Stops the code under test where it is raised, as SIGKILL would: no `except Exception` catches it."""
