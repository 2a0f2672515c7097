"""URLs of the HTTP API under ``/v1/``. ``middleware.OptionalSlash`` removes a trailing slash."""

from django.urls import path, re_path

from message_store import api

urlpatterns = [
    path("<str:application>", api.application_queues, name="store-application"),
    path("<str:application>/<str:queue>", api.queue_messages, name="store-queue"),
    path("<str:application>/<str:queue>/positions/<str:consumer>", api.consumer_positions, name="store-positions"),
    path("<str:application>/consumers/<str:consumer>/workers/<str:worker>", api.consumer_workers, name="store-workers"),
    path("<str:application>/consumers/<str:consumer>/leases/<str:worker>", api.consumer_leases, name="store-leases"),
    path("<str:application>/<str:queue>/info", api.queue_info, name="store-info"),
    path("<str:application>/<str:queue>/<str:message_ids>", api.single_messages, name="store-messages"),
    re_path(r"^", api.not_found),
]
