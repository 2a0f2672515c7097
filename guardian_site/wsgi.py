"""The WSGI application: ``gunicorn guardian_site.wsgi``."""

import os
from collections.abc import Mapping
from typing import Any

from django.core.handlers.wsgi import WSGIRequest
from django.core.wsgi import get_wsgi_application
from django.http.multipartparser import MultiPartParserError

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

    def parse_file_upload(self, META: Mapping[str, Any], post_data: Any) -> Any:  # noqa: N803 - Django's name
        """Have Django answer 400 to a part whose header has parameters that can't be parsed."""
        try:
            return super().parse_file_upload(META, post_data)
        except TypeError as error:
            raise MultiPartParserError("A header of a part can't be parsed.") from error

    @property
    def encoding(self) -> None:
        """None, so that Django uses UTF-8. Setting it has no effect."""

    @encoding.setter
    def encoding(self, charset: str | None) -> None:
        pass


application = get_wsgi_application()
application.request_class = Request
