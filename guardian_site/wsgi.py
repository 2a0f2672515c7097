"""The WSGI application: ``gunicorn guardian_site.wsgi``."""

import os
from typing import Any

from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "guardian_site.settings")


class Request(WSGIRequest):
    """A request that Django always decodes as UTF-8, because some of Python's codecs don't decode to text."""

    def _set_content_type_params(self, meta: dict[str, Any]) -> None:
        """Ignore parameters of the content type that can't be parsed: no middleware would see the error."""
        try:
            super()._set_content_type_params(meta)  # type: ignore[misc]  # private: a test notices if it changes
        except (TypeError, ValueError):
            meta["CONTENT_TYPE"] = meta["CONTENT_TYPE"].partition(";")[0]
            super()._set_content_type_params(meta)  # type: ignore[misc]

    @property
    def encoding(self) -> None:
        """None, so that Django uses UTF-8. Setting it has no effect."""

    @encoding.setter
    def encoding(self, charset: str | None) -> None:
        pass


application = get_wsgi_application()
application.request_class = Request
