"""Guardian with a timeout of one second for bodies. Run by gunicorn."""

from core import body_timeout
from guardian_site.wsgi import application

__all__ = ["application"]

body_timeout.BODY_SECONDS = 1.0
