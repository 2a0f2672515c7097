from django.apps import AppConfig


class GuardianSiteConfig(AppConfig):
    """The wiring: settings, URLs, health and system checks."""

    name = "guardian_site"

    def ready(self) -> None:
        """Register the system checks."""
        from guardian_site import checks  # noqa: F401
