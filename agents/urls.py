"""URLs of the pages about agents."""

from django.urls import URLPattern, URLResolver, path
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView

from agents.pages import views

urlpatterns: list[URLPattern | URLResolver] = [
    path("agents/", views.agents_page, name="agents"),
    path("agents/<uuid:uuid>/remove/", views.agent_remove, name="agent_remove"),
    path("agents/subscriptions/<uuid:uuid>/remove/", views.subscription_remove, name="subscription_remove"),
    path("agents/consumers/<uuid:uuid>/remove/", views.consumer_remove, name="consumer_remove"),
    # The address of the list in version 2, which people may have kept.
    path("subscriptions/", require_safe(RedirectView.as_view(pattern_name="agents", query_string=True))),
]
