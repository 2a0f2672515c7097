from django.apps import AppConfig
from django.conf import settings


class GuardianSiteConfig(AppConfig):
    name = "guardian_site"

    def ready(self) -> None:
        from core import broker
        from guardian_site import checks, logs, tracing  # noqa: F401 - the checks register themselves

        if settings.SENTRY_DSN:
            from guardian_site import sentry

            sentry.start(settings.SENTRY_DSN)
        broker.request_id = tracing.current
        broker.listeners.append(logs.log_call)
