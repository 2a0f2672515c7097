from django.apps import AppConfig


class MessageStoreConfig(AppConfig):
    name = "message_store"
    verbose_name = "Message store"
    default_auto_field = "django.db.models.BigAutoField"
