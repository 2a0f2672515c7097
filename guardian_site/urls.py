"""The table of contents of the site."""

from django.contrib import admin
from django.urls import path

from guardian_site import health, views
from queues.views import queue_page

urlpatterns = [
    path("", views.home, name="home"),
    path("queues/<uuid:uuid>/", queue_page, name="queue"),
    path("healthz", health.alive, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("admin/", admin.site.urls),
]
