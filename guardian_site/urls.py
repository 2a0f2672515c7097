"""The table of contents of the site."""

from django.contrib import admin
from django.urls import include, path

from accounts import signin
from guardian_site import health, metrics, views
from queues import operator_views

urlpatterns = [
    path("", views.home, name="home"),
    path("", include("accounts.urls")),
    path("", include("queues.urls")),
    path("", include("agents.urls")),
    path("", include("notifications.urls")),
    path("api/", include("guardian_site.api_urls")),
    path("v1/", include("message_store.urls")),
    path("message-store/", include("message_store.page_urls")),
    path("admin/login/", signin.admin_login),  # nobody has a password
    path("admin/", operator_views.front_page),  # in place of Django's own, whose name it has: admin:index
    path("admin/operate/pass/", operator_views.operate_pass, name="operate_pass"),
    path("admin/operate/brake/", operator_views.operate_brake, name="operate_brake"),
    path("admin/operate/orphans/", operator_views.operate_orphans, name="operate_orphans"),
    path("admin/operate/stale/", operator_views.operate_stale, name="operate_stale"),
    path("admin/", admin.site.urls),
    path("healthz", health.alive, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("metrics", metrics.scrape, name="metrics"),
]

handler400 = "guardian_site.errors.bad_request"
handler500 = "guardian_site.errors.server_error"
