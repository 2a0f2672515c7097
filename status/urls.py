"""URLs of the health of Guardian and the broker, for people and machines."""

from django.urls import URLPattern, URLResolver, path

from status import blocked_queues, metrics, probes, trail, views

urlpatterns: list[URLPattern | URLResolver] = [
    path("admin/", views.front_page),  # replaces Django's own, which keeps its name: admin:index
    path("admin/operate/pass/", views.operate_pass, name="operate_pass"),
    path("admin/operate/brake/", blocked_queues.operate_brake, name="operate_brake"),
    path("admin/operate/orphans/", views.operate_orphans, name="operate_orphans"),
    path("admin/operate/stale/", views.operate_stale, name="operate_stale"),
    path("admin/operate/trail/", trail.audit_trail, name="operate_trail"),
    path("healthz", probes.alive, name="healthz"),
    path("readyz", probes.ready, name="readyz"),
    path("metrics", metrics.scrape, name="metrics"),
]
