from django.apps import AppConfig


class ProcessedConfig(AppConfig):
    """The app with the table of processed messages, for those who use `consumers.django.once`."""

    name = "consumers.processed"
    label = "consumers"
    verbose_name = "consumers"
    default_auto_field = "django.db.models.BigAutoField"
