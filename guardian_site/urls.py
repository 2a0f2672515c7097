"""URLs of the site."""

from django.contrib import admin
from django.urls import include, path

from accounts.signing_in import codes
from guardian_site import help_pages, styleguide, views
from message_store.http import views as api

urlpatterns = [
    path("", views.home, name="home"),
    path("", include("accounts.urls")),
    path("", include("queues.urls")),
    path("", include("agents.urls")),
    path("", include("notifications.urls")),
    path("api/", include("guardian_site.api_urls")),
    path("help/", help_pages.index, name="help"),
    path("help/<slug:name>/", help_pages.document, name="help_document"),
    path("help/examples/<str:name>", help_pages.example, name="help_example"),
    path("styleguide/", styleguide.page, name="styleguide"),
    path("v1/", include("message_store.http.urls")),
    path("__heartbeat__", api.heartbeat, name="store-heartbeat"),
    path("message-store/", include("message_store.pages.urls")),
    path("admin/login/", codes.admin_login),  # owners have no password
    path("", include("status.urls")),
    path("admin/", admin.site.urls),
]

handler400 = "guardian_site.errors.bad_request"
handler500 = "guardian_site.errors.server_error"
