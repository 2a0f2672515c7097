"""Queues and exchanges."""

from django.urls import URLPattern, URLResolver, path

from queues import archive_views, exchange_views, limit_views, replay_views, selected_views, views

urlpatterns: list[URLPattern | URLResolver] = [
    # Queues
    path("queues/", views.queues_page, name="queues"),
    path("queues/selected/", selected_views.queues_selected, name="queues_selected"),
    path("queues/<uuid:uuid>/", views.queue_page, name="queue"),
    path("queues/<uuid:uuid>/chart/", views.queue_chart, name="queue_chart"),
    path("queues/<uuid:uuid>/delete/", views.queue_delete, name="queue_delete"),
    path("queues/<uuid:uuid>/purge/", views.queue_purge, name="queue_purge"),
    path("queues/<uuid:uuid>/messages/", archive_views.queue_messages, name="queue_messages"),
    path("queues/<uuid:uuid>/limits/", limit_views.queue_limits, name="queue_limits"),
    path("queues/<uuid:uuid>/limits/decline/", limit_views.queue_limit_decline, name="queue_limit_decline"),
    path("queues/<uuid:uuid>/limits/ask/", limit_views.queue_limit_request, name="queue_limit_request"),
    # Archives
    path("archives/", archive_views.archives_page, name="archives"),
    path("archives/<uuid:uuid>/", archive_views.archive_page, name="archive"),
    path("archives/<uuid:uuid>/messages/<int:position>/", archive_views.message_page, name="archive_message"),
    path("archives/<uuid:uuid>/messages/<int:position>/body/", archive_views.message_body, name="archive_body"),
    path("archives/<uuid:uuid>/download/", archive_views.archive_download, name="archive_download"),
    path("archives/<uuid:uuid>/delete/", archive_views.archive_delete, name="archive_delete"),
    path("archives/<uuid:uuid>/replay/", replay_views.archive_replay, name="archive_replay"),
    path("archives/<uuid:uuid>/replays/<uuid:replay_uuid>/", replay_views.replay_page, name="replay"),
    path("archives/<uuid:uuid>/replays/<uuid:replay_uuid>/stop/", replay_views.replay_stop, name="replay_stop"),
    # Exchanges
    path("exchanges/", exchange_views.exchanges_page, name="exchanges"),
    path("exchanges/delete/", exchange_views.exchange_delete, name="exchange_delete"),
]
