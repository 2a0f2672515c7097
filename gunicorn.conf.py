"""What gunicorn reads by itself. Its workers log by Django's settings; this is for the process above them.

That process must import nothing of Guardian's, or it would hand old code to the workers that it starts after a reload.
"""

import os
import runpy
from pathlib import Path

keepalive = 100
"""Seconds. Longer than clients and proxies keep idle connections: httpx 5 s, nginx 60 s, Heroku's router 90 s.

If Guardian closes a connection first, it may do so while the next request is on its way, and the client gets an error.
"""

_variables = runpy.run_path("guardian_site/env_file.py")["parse"](Path(".env")).variables

if os.environ.get("LOG_FORMAT", _variables.get("LOG_FORMAT")) == "json":
    logconfig_dict = {
        "formatters": {
            "json": {
                "()": "pythonjsonlogger.json.JsonFormatter",
                "fmt": ["levelname", "name", "process", "message"],
                "rename_fields": {"levelname": "level", "name": "logger", "exc_info": "exception"},
                "timestamp": "time",
            },
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"handlers": ["stderr"], "level": "INFO"},
        "loggers": {"gunicorn.error": {"handlers": [], "propagate": True}},
    }
