"""Queues and exchanges."""

from django.urls import URLPattern, URLResolver, path

from queues.pages import (
    archives,
    destroy,
    exchanges,
    limits,
    moves,
    notices,
    queue,
    queue_list,
    replays,
    restores,
    selected,
    watch,
)

urlpatterns: list[URLPattern | URLResolver] = [
    # Queues
    path("queues/", queue_list.queues_page, name="queues"),
    path("queues/selected/", selected.queues_selected, name="queues_selected"),
    path("queues/<uuid:uuid>/", queue.queue_page, name="queue"),
    path("queues/<uuid:uuid>/dismiss/", queue.queue_dismiss, name="queue_dismiss"),
    path("queues/<uuid:uuid>/delete/", destroy.queue_delete, name="queue_delete"),
    path("queues/<uuid:uuid>/purge/", destroy.queue_purge, name="queue_purge"),
    path("queues/<uuid:uuid>/messages/", archives.queue_messages, name="queue_messages"),
    path("queues/<uuid:uuid>/move/", moves.queue_move, name="queue_move"),
    path("queues/<uuid:uuid>/dead-letters/", moves.dead_letters, name="dead_letters"),
    path("queues/<uuid:uuid>/moves/<uuid:move_uuid>/", moves.move_page, name="move"),
    path("queues/<uuid:uuid>/moves/<uuid:move_uuid>/stop/", moves.move_stop, name="move_stop"),
    path("queues/<uuid:uuid>/limits/", limits.queue_limits, name="queue_limits"),
    path("queues/<uuid:uuid>/limits/decline/", limits.queue_limit_decline, name="queue_limit_decline"),
    path("queues/<uuid:uuid>/limits/ask/", limits.queue_limit_request, name="queue_limit_request"),
    path("queues/<uuid:uuid>/watch/", watch.queue_watch, name="queue_watch"),
    path("queues/<uuid:uuid>/mute/", notices.queue_mute, name="queue_mute"),
    path("queues/<uuid:uuid>/acknowledge/", notices.queue_acknowledge, name="queue_acknowledge"),
    # Archives
    path("archives/", archives.archives_page, name="archives"),
    path("archives/<uuid:uuid>/", archives.archive_page, name="archive"),
    path("archives/<uuid:uuid>/messages/<int:position>/", archives.message_page, name="archive_message"),
    path("archives/<uuid:uuid>/messages/<int:position>/body/", archives.message_body, name="archive_body"),
    path("archives/<uuid:uuid>/download/", archives.archive_download, name="archive_download"),
    path("archives/<uuid:uuid>/delete/", archives.archive_delete, name="archive_delete"),
    path("archives/<uuid:uuid>/restore/", restores.archive_restore, name="archive_restore"),
    path("archives/<uuid:uuid>/replays/<uuid:replay_uuid>/", replays.replay_page, name="replay"),
    path("archives/<uuid:uuid>/replays/<uuid:replay_uuid>/stop/", replays.replay_stop, name="replay_stop"),
    # Exchanges
    path("exchanges/", exchanges.exchanges_page, name="exchanges"),
    path("exchanges/exchange/", exchanges.exchange_page, name="exchange"),
    path("exchanges/watches/<uuid:uuid>/", watch.watch_page, name="watch"),
    path("exchanges/watches/<uuid:uuid>/stop/", watch.watch_stop, name="watch_stop"),
    path("exchanges/watch/", watch.exchange_watch, name="exchange_watch"),
    path("exchanges/delete/", exchanges.exchange_delete, name="exchange_delete"),
]
