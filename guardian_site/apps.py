from django.apps import AppConfig
from django.conf import settings


class GuardianSiteConfig(AppConfig):
    """The wiring: settings, URLs, health and system checks."""

    name = "guardian_site"

    def ready(self) -> None:
        """Register the system checks, and what is logged and counted of the calls to the broker."""
        from django.db.models.signals import post_save

        from core import broker
        from guardian_site import checks, counters, logs, tracing  # noqa: F401

        if settings.SENTRY_DSN:
            from guardian_site import sentry

            sentry.start(settings.SENTRY_DSN)
        broker.request_id = tracing.current
        broker.listeners += [logs.tell_call, counters.count_call]
        post_save.connect(counters.count_pass, sender="queues.Pass")
        post_save.connect(counters.count_sweep, sender="agents.Sweep")
