"""Guardian that waits for a body for a second only. Run by gunicorn."""

from guardian_site.wsgi import application
from message_store import forms

__all__ = ["application"]

forms.BODY_SECONDS = 1.0
