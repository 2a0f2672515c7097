"""Queues and exchanges."""

from django.urls import URLPattern, URLResolver, path

from queues import views

urlpatterns: list[URLPattern | URLResolver] = [
    # Queues
    path("queues/", views.queues_page, name="queues"),
    path("queues/<uuid:uuid>/", views.queue_page, name="queue"),
    path("queues/<uuid:uuid>/chart/", views.queue_chart, name="queue_chart"),
    path("queues/<uuid:uuid>/delete/", views.queue_delete, name="queue_delete"),
    path("queues/<uuid:uuid>/purge/", views.queue_purge, name="queue_purge"),
    path("queues/<uuid:uuid>/limits/", views.queue_limits, name="queue_limits"),
    # Exchanges
    path("exchanges/", views.exchanges_page, name="exchanges"),
    path("exchanges/delete/", views.exchange_delete, name="exchange_delete"),
]
