"""URLs of the REST API, under ``/api/``. UUIDs in paths may have dashes."""

from django.urls import URLPattern, URLResolver, path, re_path
from rest_framework.routers import SimpleRouter

from accounts.api import views as accounts
from agents.api import event_consumers, services
from agents.api import views as agents
from guardian_site import api_docs, version
from guardian_site.errors import UnknownAddress
from notifications import api
from queues.api import archives, moves, queues, watches

router = SimpleRouter(use_regex_path=False)
router.register("pulse-users", accounts.PulseUsers, "api-pulse-user")
router.register("invitations", accounts.Invitations, "api-invitation")
router.register("owners", accounts.Owners, "api-owner")
router.register("tokens", accounts.Tokens, "api-token")
router.register("queues/selected", queues.SelectedQueues, "api-selected-queues")
router.register("queues", queues.Queues, "api-queue")
router.register("archives", archives.Archives, "api-archive")
router.register("archives/<str:uuid>/replays", archives.Replays, "api-replay")
router.register("moves", moves.Moves, "api-move")
router.register("watches", watches.Watches, "api-watch")
router.register("channels", api.Channels, "api-channel")
router.register("offerings", agents.Offerings, "api-offering")
router.register("marketplace-site-agent-identities", agents.AgentIdentities, "api-agent-identity")
router.register("agent-identities", agents.AgentIdentities, "api-short-agent-identity")  # agents use both prefixes
router.register("marketplace-site-agent-services", services.AgentServices, "api-agent-service")
router.register("marketplace-site-agent-processors", services.AgentProcessors, "api-agent-processor")
router.register("agent-consumers", agents.Consumers, "api-agent-consumer")
router.register("event-consumers", event_consumers.EventConsumers, "api-event-consumer")
router.register("event-subscriptions", agents.EventSubscriptions, "api-event-subscription")
router.register("event-subscription-queues", agents.SubscriptionQueues, "api-event-subscription-queue")

urlpatterns: list[URLPattern | URLResolver] = [
    *router.urls,
    path("pulse-users/<str:username>/notifications/", api.Mutes.as_view({"get": "retrieve", "put": "update"})),
    path("me/", accounts.Me.as_view({"get": "retrieve"}), name="api-me"),
    path("users/me/", services.UserMe.as_view()),
    path("vouching/ask/", accounts.Me.as_view({"post": "ask"})),
    path("exchanges/", queues.Exchanges.as_view({"get": "list", "delete": "destroy"}), name="api-exchanges"),
    path("exchanges/traffic/", queues.Exchanges.as_view({"get": "traffic"})),
    path("settings/", api.Preferences.as_view({"get": "retrieve", "patch": "partial_update"})),
    path("version/", version.Version.as_view()),
    path("schema/", api_docs.SchemaView.as_view(), name="api-schema"),
    path("docs/", api_docs.start, name="api-docs"),
    path("docs/<str:tag>/", api_docs.resource, name="api-docs-resource"),
    re_path(r"^", UnknownAddress.as_view()),  # any other path, including line breaks, with or without a trailing slash
]
