"""The table of contents of the site."""

from django.contrib import admin
from django.urls import path

from guardian_site import health, views

urlpatterns = [
    path("", views.home, name="home"),
    path("healthz", health.alive, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("admin/", admin.site.urls),
]
