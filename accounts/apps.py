from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "accounts"

    def ready(self) -> None:
        """Audit what people change, and register how Pulse users are removed."""
        from accounts import audit  # noqa: F401 - models can't be imported earlier
        from accounts.pulse_users import removal

        removal.register_handler()
