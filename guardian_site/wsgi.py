"""The WSGI application: ``gunicorn guardian_site.wsgi``."""

import os

from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")


class Request(WSGIRequest):
    """A request that Django always decodes as UTF-8, because some of Python's codecs don't decode to text."""

    @property
    def encoding(self) -> None:
        """None, so that Django uses UTF-8. Setting it has no effect."""

    @encoding.setter
    def encoding(self, charset: str | None) -> None:
        pass


application = get_wsgi_application()
application.request_class = Request
