from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Owners, and their accounts on the broker."""

    name = "accounts"

    def ready(self) -> None:
        """Watch what people change."""
        from accounts import audit  # noqa: F401 - models can't be imported before
