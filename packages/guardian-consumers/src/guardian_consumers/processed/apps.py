from django.apps import AppConfig


class ProcessedConfig(AppConfig):
    """The app with the table of processed messages for `guardian_consumers.django.once`."""

    name = "guardian_consumers.processed"
    label = "consumers"
    verbose_name = "consumers"
    default_auto_field = "django.db.models.BigAutoField"
