"""URLs of the REST API, under ``/api/``. UUIDs in paths may have dashes."""

from django.urls import URLPattern, URLResolver, path, re_path

from accounts.api import views as accounts
from agents.api import event_consumers, services, unused
from agents.api import views as agents
from guardian_site import api_docs, version
from guardian_site.errors import UnknownAddress
from notifications import api
from queues.api import archives, queues


def identities(prefix: str, name: str | None = None) -> list[URLPattern]:
    """Return the URLs of agent identities under a prefix. Older agents use one prefix, newer ones another."""
    view = agents.AgentIdentities
    return [
        path(prefix, view.as_view({"get": "list", "post": "create"})),
        path(f"{prefix}cleanup_orphaned/", unused.OrphanedIdentities.as_view()),
        path(
            f"{prefix}<str:uuid>/", view.as_view({"get": "retrieve", "put": "update", "delete": "destroy"}), name=name
        ),
        path(f"{prefix}<str:uuid>/register_event_subscription/", view.as_view({"post": "register_event_subscription"})),
        path(f"{prefix}<str:uuid>/register_queue/", view.as_view({"post": "register_queue"})),
        path(f"{prefix}<str:uuid>/create_queue/", view.as_view({"post": "create_queue"})),
        path(f"{prefix}<str:uuid>/register_service/", view.as_view({"post": "register_service"})),
    ]


urlpatterns: list[URLPattern | URLResolver] = [
    # Pulse users
    path(
        "pulse-users/",
        accounts.PulseUsers.as_view({"get": "list", "post": "create"}),
        name="api-pulse-users",
    ),
    path(
        "pulse-users/<str:username>/",
        accounts.PulseUsers.as_view({"get": "retrieve", "patch": "partial_update", "delete": "destroy"}),
        name="api-pulse-user",
    ),
    path("pulse-users/<str:username>/rotate-password/", accounts.PulseUsers.as_view({"post": "rotate_password"})),
    path(
        "pulse-users/<str:username>/connections/",
        accounts.PulseUsers.as_view({"get": "connections", "delete": "close_connection"}),
    ),
    path(
        "pulse-users/<str:username>/notifications/",
        api.Mutes.as_view({"get": "retrieve", "put": "update"}),
    ),
    path("pulse-users/<str:username>/belongings/", accounts.PulseUsers.as_view({"get": "belongings"})),
    path("pulse-users/<str:username>/ask-again/", accounts.PulseUsers.as_view({"post": "ask_again"})),
    path("invitations/", accounts.Invitations.as_view({"get": "list"})),
    path("invitations/<str:uuid>/", accounts.Invitations.as_view({"get": "retrieve"})),
    path("invitations/<str:uuid>/accept/", accounts.Invitations.as_view({"post": "accept"})),
    path("invitations/<str:uuid>/decline/", accounts.Invitations.as_view({"post": "decline"})),
    # Owners
    path("me/", accounts.Me.as_view({"get": "retrieve"}), name="api-me"),
    path("vouching/ask/", accounts.Me.as_view({"post": "ask"})),
    path("owners/", accounts.Owners.as_view({"get": "list"})),
    path("owners/vouch/", accounts.Owners.as_view({"post": "vouch_for"})),
    path("owners/adopt/", accounts.Owners.as_view({"get": "adoptable", "post": "adopt"}, pagination_class=None)),
    path("owners/<str:uuid>/", accounts.Owners.as_view({"get": "retrieve"}), name="api-owner"),
    path("owners/<str:uuid>/vouch/", accounts.Owners.as_view({"post": "vouch"})),
    path("owners/<str:uuid>/withdraw/", accounts.Owners.as_view({"post": "withdraw"})),
    # Tokens
    path("tokens/", accounts.Tokens.as_view({"get": "list", "post": "create"})),
    path("tokens/current/", accounts.Tokens.as_view({"delete": "destroy_current"})),
    path("tokens/<str:uuid>/", accounts.Tokens.as_view({"get": "retrieve", "delete": "destroy"})),
    # Queues
    path("queues/", queues.Queues.as_view({"get": "list"}), name="api-queues"),
    path("queues/selected/delete/", queues.SelectedQueues.as_view({"post": "delete_selected"})),
    path("queues/selected/purge/", queues.SelectedQueues.as_view({"post": "purge_selected"})),
    path("queues/selected/limits/", queues.SelectedQueues.as_view({"post": "limit_selected"})),
    path("queues/selected/release/", queues.SelectedQueues.as_view({"post": "release_selected"})),
    path(
        "queues/<str:uuid>/",
        queues.Queues.as_view({"get": "retrieve", "patch": "partial_update", "delete": "destroy"}),
        name="api-queue",
    ),
    path("queues/<str:uuid>/purge/", queues.Queues.as_view({"post": "purge"})),
    path("queues/<str:uuid>/limits/ask/", queues.Queues.as_view({"post": "ask_for_limit"})),
    path("queues/<str:uuid>/limits/decline/", queues.Queues.as_view({"post": "decline_limit"})),
    path("queues/<str:uuid>/live/", queues.Queues.as_view({"get": "live"})),
    path("queues/<str:uuid>/bindings/", queues.Queues.as_view({"get": "bindings"})),
    path("queues/<str:uuid>/samples/", queues.Queues.as_view({"get": "samples"}, pagination_class=None)),
    path("queues/<str:uuid>/events/", queues.Queues.as_view({"get": "events"})),
    path("queues/<str:uuid>/messages/", queues.Queues.as_view({"get": "messages"}, pagination_class=None)),
    # Archives
    path("archives/", archives.Archives.as_view({"get": "list"})),
    path("archives/<str:uuid>/", archives.Archives.as_view({"get": "retrieve", "delete": "destroy"})),
    path("archives/<str:uuid>/messages/", archives.Archives.as_view({"get": "messages"}, pagination_class=None)),
    path("archives/<str:uuid>/download/", archives.Archives.as_view({"get": "download"})),
    path("archives/<str:uuid>/replay/", archives.Archives.as_view({"post": "replay"})),
    path("archives/<str:uuid>/replays/", archives.Replays.as_view({"get": "list"})),
    path(
        "archives/<str:uuid>/replays/<str:replay_uuid>/",
        archives.Replays.as_view({"get": "retrieve", "delete": "destroy"}),
    ),
    # Exchanges
    path("exchanges/", queues.Exchanges.as_view({"get": "list", "delete": "destroy"}), name="api-exchanges"),
    # Channels and settings
    path("channels/", api.Channels.as_view({"get": "list", "post": "create"})),
    path("channels/<str:uuid>/", api.Channels.as_view({"get": "retrieve", "delete": "destroy"})),
    path("channels/<str:uuid>/test/", api.Channels.as_view({"post": "test"})),
    path("settings/", api.Preferences.as_view({"get": "retrieve", "patch": "partial_update"})),
    # Offerings
    path("offerings/", agents.Offerings.as_view({"get": "list"})),
    path("offerings/<str:uuid>/", agents.Offerings.as_view({"get": "retrieve"}), name="api-offering"),
    path("offerings/<str:uuid>/events/", agents.Offerings.as_view({"post": "publish"})),
    # Agents
    *identities("marketplace-site-agent-identities/", name="api-agent-identity"),
    *identities("agent-identities/"),
    path("agent-consumers/", agents.Consumers.as_view({"get": "list"})),
    path(
        "agent-consumers/<str:uuid>/",
        agents.Consumers.as_view({"get": "retrieve", "delete": "destroy"}),
        name="api-agent-consumer",
    ),
    path("event-consumers/", event_consumers.EventConsumers.as_view({"get": "list"})),
    path("event-consumers/register/", event_consumers.EventConsumers.as_view({"post": "register"})),
    path(
        "event-consumers/<str:uuid>/",
        event_consumers.EventConsumers.as_view({"get": "retrieve", "patch": "partial_update", "delete": "destroy"}),
        name="api-event-consumer",
    ),
    path("marketplace-site-agent-services/", services.AgentServices.as_view({"get": "list"})),
    path("marketplace-site-agent-services/cleanup_stale/", unused.StaleServices.as_view()),
    path(
        "marketplace-site-agent-services/<str:uuid>/",
        services.AgentServices.as_view({"get": "retrieve", "delete": "destroy"}),
        name="api-agent-service",
    ),
    path(
        "marketplace-site-agent-services/<str:uuid>/register_processor/",
        services.AgentServices.as_view({"post": "register_processor"}),
    ),
    path(
        "marketplace-site-agent-services/<str:uuid>/set_statistics/",
        services.AgentServices.as_view({"post": "set_statistics"}),
    ),
    path("marketplace-site-agent-processors/", services.AgentProcessors.as_view({"get": "list"})),
    path(
        "marketplace-site-agent-processors/<str:uuid>/",
        services.AgentProcessors.as_view({"get": "retrieve", "delete": "destroy"}),
        name="api-agent-processor",
    ),
    path("version/", version.Version.as_view()),
    path("users/me/", services.UserMe.as_view()),
    path("event-subscriptions/", agents.EventSubscriptions.as_view({"get": "list", "post": "create"})),
    path(
        "event-subscriptions/<str:uuid>/",
        agents.EventSubscriptions.as_view({"get": "retrieve", "delete": "destroy"}),
        name="api-event-subscription",
    ),
    path("event-subscriptions/<str:uuid>/create_queue/", agents.EventSubscriptions.as_view({"post": "create_queue"})),
    path("event-subscription-queues/", agents.SubscriptionQueues.as_view({"get": "list"})),
    path(
        "event-subscription-queues/<str:uuid>/",
        agents.SubscriptionQueues.as_view({"get": "retrieve", "delete": "destroy"}),
        name="api-event-subscription-queue",
    ),
    # Schema
    path("schema/", api_docs.SchemaView.as_view(), name="api-schema"),
    path("docs/", api_docs.page, name="api-docs"),
    re_path(r"^", UnknownAddress.as_view()),  # any other path, including line breaks, with or without a trailing slash
]
