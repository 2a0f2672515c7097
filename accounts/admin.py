from django.contrib import admin

from accounts.models import Owner, PulseUser


@admin.register(Owner)
class OwnerAdmin(admin.ModelAdmin):
    """Owners. Their passwords, which only operators may have, are set by ``changepassword``."""

    list_display = ["email", "vouched", "is_staff", "is_active", "date_joined"]
    list_filter = ["vouched", "is_staff", "is_active"]
    search_fields = ["email", "full_name"]
    fields = ["email", "full_name", "vouched", "is_staff", "is_superuser", "is_active", "uuid", "date_joined"]
    readonly_fields = ["uuid", "date_joined", "last_login"]


@admin.register(PulseUser)
class PulseUserAdmin(admin.ModelAdmin):
    """RabbitMQ accounts. They are made and removed together with the account on the broker, so not here."""

    list_display = ["username", "warn_length", "max_length", "ready", "created"]
    search_fields = ["username", "owners__email"]
    readonly_fields = ["username", "ready", "created"]
    filter_horizontal = ["owners"]

    def has_add_permission(self, request: object) -> bool:
        """Refuse: a row alone would stand for no account."""
        return False

    def has_delete_permission(self, request: object, obj: PulseUser | None = None) -> bool:
        """Refuse: the account on the broker would stay."""
        return False
