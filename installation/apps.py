from django.apps import AppConfig


class InstallationConfig(AppConfig):
    name = "installation"

    def ready(self) -> None:
        """Let the commands that import Pulse users write a file."""
        from accounts.importing import adoption
        from installation import exporting

        adoption.as_installation_file = exporting.of_steps
