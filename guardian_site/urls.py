"""The table of contents of the site."""

from django.contrib import admin
from django.urls import include, path

from accounts import signin
from guardian_site import health, views

urlpatterns = [
    path("", views.home, name="home"),
    path("", include("accounts.urls")),
    path("", include("queues.urls")),
    path("api/", include("guardian_site.api_urls")),
    path("admin/login/", signin.admin_login),  # nobody has a password
    path("admin/", admin.site.urls),
    path("healthz", health.alive, name="healthz"),
    path("readyz", health.ready, name="readyz"),
]

handler400 = "guardian_site.errors.bad_request"
handler500 = "guardian_site.errors.server_error"
