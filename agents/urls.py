"""URLs of the pages about agents' subscriptions."""

from django.urls import URLPattern, URLResolver, path

from agents.pages import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("subscriptions/", views.subscriptions_page, name="subscriptions"),
    path("subscriptions/<uuid:uuid>/remove/", views.subscription_remove, name="subscription_remove"),
    path("subscriptions/agents/<uuid:uuid>/remove/", views.agent_remove, name="agent_remove"),
    path("subscriptions/consumers/<uuid:uuid>/remove/", views.consumer_remove, name="consumer_remove"),
]
