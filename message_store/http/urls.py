"""URLs of the HTTP API under ``/v1/``. ``middleware.OptionalSlash`` removes a trailing slash."""

from django.urls import path, re_path

from message_store.http import views

urlpatterns = [
    path("<str:application>", views.application_queues, name="store-application"),
    path("<str:application>/<str:queue>", views.queue_messages, name="store-queue"),
    path("<str:application>/<str:queue>/positions/<str:consumer>", views.consumer_positions, name="store-positions"),
    path(
        "<str:application>/consumers/<str:consumer>/workers/<str:worker>", views.consumer_workers, name="store-workers"
    ),
    path("<str:application>/consumers/<str:consumer>/leases/<str:worker>", views.consumer_leases, name="store-leases"),
    path("<str:application>/<str:queue>/info", views.queue_info, name="store-info"),
    path("<str:application>/<str:queue>/<str:message_ids>", views.single_messages, name="store-messages"),
    re_path(r"^", views.not_found),
]
