"""URLs of the message store's pages under ``/message-store/``."""

from django.urls import path

from message_store.pages import views

urlpatterns = [
    path("", views.message_store_page, name="message_store"),
    path("<str:application>/", views.stored_queues_page, name="stored_queues"),
    path("<str:application>/<str:queue>/", views.stored_queue_page, name="stored_queue"),
]
