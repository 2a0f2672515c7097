"""The notification settings."""

from django.urls import URLPattern, URLResolver, path

from notifications import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("settings/", views.settings_page, name="settings"),
    path("pulse-users/<pulse_user:username>/notifications/", views.mutes_page, name="mutes"),
    path("settings/channels/<uuid:uuid>/test/", views.channel_test, name="channel_test"),
    path("settings/channels/<uuid:uuid>/delete/", views.channel_delete, name="channel_delete"),
]
