"""What gunicorn serves: ``gunicorn guardian_site.wsgi``."""

import os

from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")


class Request(WSGIRequest):
    """A request in UTF-8, whatever charset it names: some that Python knows are none of text, and reading fails."""

    @property
    def encoding(self) -> None:
        """None, by which Django reads UTF-8. What it sets is left."""

    @encoding.setter
    def encoding(self, charset: str | None) -> None:
        pass


application = get_wsgi_application()
application.request_class = Request
