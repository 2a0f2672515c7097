from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Owners, and their accounts on the broker."""

    name = "accounts"

    def ready(self) -> None:
        """Audit what people change, and register how accounts are removed."""
        from accounts import audit, removal  # noqa: F401 - models can't be imported earlier

        removal.register_handler()
