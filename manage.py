#!/usr/bin/env python
"""Django's command line for Guardian."""

import os
import sys

from django.core.management import execute_from_command_line

from guardian_site import tracing

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")
    tracing.set_new_id()
    execute_from_command_line(sys.argv)
