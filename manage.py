#!/usr/bin/env python
"""Django's command line for Guardian."""

import os
import sys

from django.core.management import execute_from_command_line
from django.db import OperationalError

from guardian_site import tracing

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")
    tracing.set_new_id()
    try:
        execute_from_command_line(sys.argv)
    except OperationalError as error:
        if getattr(error.__cause__, "pgcode", "") is not None:  # only an error of the connection has none
            raise
        sys.exit(f"Check the host, the user and the password in DATABASE_URL: {' '.join(str(error).split())}")
