"""Guardian's own settings: each with its name in the environment, type, default and limits, and what it is for.

They come from the environment, or from ``.env`` beside ``manage.py``. Defaults are written as in ``.env``.
``make docs`` writes ``.env.example`` and ``docs/settings.md`` from this module. ``checks.py`` reports invalid values.
"""

from pathlib import Path

from core.addresses import ascii_domain
from guardian_site import environment
from guardian_site.environment import database, flag, host_of, items, log_level, mail_server, number, read, url

BASE_DIR = Path(__file__).resolve().parent.parent

environment.load(BASE_DIR / ".env")

## The installation

DEBUG = read("DEBUG", flag, "false")
"""Show details of errors to everybody. For development only."""

SECRET_KEY = read("SECRET_KEY", str, "insecure-and-for-debugging-only" if DEBUG else "")
"""A long random secret. Required unless DEBUG is true. `make setup` creates one."""

GUARDIAN_BASE_URL = read("GUARDIAN_BASE_URL", url, "http://127.0.0.1:8000", schemes=("http", "https"))
"""The address of Guardian: scheme and host, without a path. With https://, Guardian redirects to HTTPS, and sets
Secure cookies and HSTS: browsers use only HTTPS for this host, not for its subdomains, for a year."""

uses_https = GUARDIAN_BASE_URL.startswith("https://")

ALLOWED_HOSTS = read("ALLOWED_HOSTS", items, host_of(GUARDIAN_BASE_URL))
"""Host names that Guardian answers to, separated by commas. By default the host of GUARDIAN_BASE_URL."""

GUARDIAN_PROXIES = read("GUARDIAN_PROXIES", int, "1" if uses_https else "0", least=0, most=10)
"""The number of proxies in front that append to X-Forwarded-For. By default 1 with https://, else 0. Behind a proxy,
the log uses its X-Request-ID."""

LOG_LEVEL = read("LOG_LEVEL", log_level, "INFO")
"""The log level: DEBUG, INFO, WARNING or ERROR."""

VAR_DIR = read("GUARDIAN_VAR_DIR", Path, str(BASE_DIR / "var"))
"""The folder of the SQLite database, the file-system task queue and the logs. By default var/ beside manage.py."""

## Database and task queue

default_database = read("DATABASE_URL", database, f"sqlite:///{VAR_DIR / 'guardian.sqlite3'}")
"""The database. By default SQLite in GUARDIAN_VAR_DIR. PostgreSQL: postgres://user:password@host:5432/guardian"""

CELERY_BROKER_URL = read("CELERY_BROKER_URL", str, "filesystem://")
"""Celery's broker. Never use the guarded RabbitMQ. In production use Redis: redis://host:6379/0"""

## The guarded broker

RABBITMQ_MANAGEMENT_URL = read(
    "RABBITMQ_MANAGEMENT_URL", str, "http://guest:guest@127.0.0.1:15672" if DEBUG else "", schemes=("http", "https")
)
"""The management API of the guarded RabbitMQ, with a user that has the administrator tag:
http://user:password@host:15672. Of a cluster, several nodes' addresses, separated by commas; they are tried in turn.
Write a comma in a password as %2C."""

RABBIT_URL = read("RABBIT_URL", str, "amqp://guest:guest@127.0.0.1:5672" if DEBUG else "", schemes=("amqp", "amqps"))
"""The same broker over AMQP, to recheck, archive and delete queues: amqp://user:password@host:5672, or several
addresses."""

GUARDIAN_PUBLIC_AMQP_URL = read("GUARDIAN_PUBLIC_AMQP_URL", str, "", schemes=("amqp", "amqps"))
"""Where owners connect to the broker, shown on their pages with examples: amqps://rabbit.example.org:5671"""

GUARDIAN_PUBLIC_STOMP_URL = read("GUARDIAN_PUBLIC_STOMP_URL", str, "", schemes=("ws", "wss"))
"""Where agents connect over STOMP: wss://rabbit.example.org:443/ws"""

GUARDIAN_VHOSTS = read("GUARDIAN_VHOSTS", items, "")
"""The guarded vhosts, separated by commas; *: all. By default / and every vhost that Guardian created. Guardian creates
a vhost for each owner of agents: with agents, leave this empty or set it to *."""

GUARDIAN_PULSE_VHOST = read("GUARDIAN_PULSE_VHOST", str, "/")
"""The vhost of the Pulse users' queues and exchanges."""

# A pass may wait several timeouts within its lease of 90 s.
GUARDIAN_BROKER_TIMEOUT_SECONDS = read("GUARDIAN_BROKER_TIMEOUT_SECONDS", number, "20", least=0.1, most=20)
"""Timeout in seconds for an answer of the management API, at most 20."""

GUARDIAN_POLL_SECONDS = read("GUARDIAN_POLL_SECONDS", number, "5", least=0.1, most=3600)
"""Seconds between two passes of the monitor."""

GUARDIAN_POLL_MAX_SECONDS = read("GUARDIAN_POLL_MAX_SECONDS", number, "60")
"""The longest interval in seconds between two passes while the broker is unreachable."""

## Limits, archives and notifications

GUARDIAN_WARN_QUEUE_LENGTH = read("GUARDIAN_WARN_QUEUE_LENGTH", int, "2000", least=1)
"""The warning threshold in messages: at this length, a queue's owner is notified."""

GUARDIAN_MAX_QUEUE_LENGTH = read("GUARDIAN_MAX_QUEUE_LENGTH", int, "8000")
"""The deletion limit in messages: a longer queue is deleted."""

GUARDIAN_THRESHOLD_POLICY = read("GUARDIAN_THRESHOLD_POLICY", str, "static")
"""static: these two limits for every queue. memory-pressure: as memory fills, the limits of the queues that use the
most memory are lower."""

GUARDIAN_QUIET_SECONDS = read("GUARDIAN_QUIET_SECONDS", int, "900", least=0, most=604_800)
"""Seconds after a warning in which further changes of the queue are merged into one message; 0: none are."""

GUARDIAN_REMINDER_HOURS = read("GUARDIAN_REMINDER_HOURS", int, "24", least=0, most=8760)
"""Hours after which owners are notified again of a queue that is still over its warning threshold, at least 24; 0: they
are not."""

GUARDIAN_DELETE_BRAKE = read("GUARDIAN_DELETE_BRAKE", int, "50", least=0)
"""At most this many queues may wait to be deleted, or a quarter of all, whichever is larger. Beyond that, deletion is
blocked until an operator decides."""

GUARDIAN_DELETERS = read("GUARDIAN_DELETERS", int, "4", least=1, most=32)
"""How many queues are archived and deleted at once."""

GUARDIAN_DELETE_WAIT_SECONDS = read("GUARDIAN_DELETE_WAIT_SECONDS", int, "60", least=1, most=86_400)
"""Seconds after which a queue that still waits for its archive is deleted without one, if it has more than twice its
limit, or the broker's memory or disk alarm is raised. Operators are notified when a deletion has waited for longer."""

GUARDIAN_NAMESPACE_POLICY = read(
    "GUARDIAN_NAMESPACE_POLICY", str, "report", choices=("report", "delete-misnamed", "delete-unpatterned")
)
"""What happens to queues whose names belong to no Pulse user: report, delete-misnamed or delete-unpatterned (both
kinds)."""

GUARDIAN_IGNORED_QUEUES = read("GUARDIAN_IGNORED_QUEUES", str, "")
"""A regular expression, searched for in names. Matching queues are not guarded. Empty: none."""

GUARDIAN_FORGET_DAYS = read("GUARDIAN_FORGET_DAYS", int, "30", least=1, most=3650)
"""Days for which the row of a queue that is gone is kept."""

GUARDIAN_ARCHIVE_DAYS = read("GUARDIAN_ARCHIVE_DAYS", int, "7", least=0, most=3650)
"""Days for which the messages of deleted and purged queues are archived for their owners; 0: archives are off."""

GUARDIAN_ARCHIVE_MAX_MESSAGES = read("GUARDIAN_ARCHIVE_MAX_MESSAGES", int, "20000", least=1, most=1_000_000)
"""The maximum number of messages in the archive of one queue. Messages beyond this and the next two limits are deleted
and counted."""

GUARDIAN_ARCHIVE_MAX_BYTES = read("GUARDIAN_ARCHIVE_MAX_BYTES", int, "67108864", least=1, most=1 << 30)
"""The maximum number of bytes of messages in the archive of one queue."""

GUARDIAN_ARCHIVE_SECONDS = read("GUARDIAN_ARCHIVE_SECONDS", int, "20", least=1, most=20)  # within the lease
"""Seconds to fetch the messages of one queue. While the memory alarm is raised, seconds for all queues."""

GUARDIAN_ARCHIVE_TOTAL_BYTES = read("GUARDIAN_ARCHIVE_TOTAL_BYTES", int, "1073741824", least=1, most=1 << 50)
"""The maximum number of bytes of all archives, compressed. One owner may use a fifth; past it, their own oldest
archives are deleted. When all are too many, the oldest of the owner who uses most are."""

GUARDIAN_OPERATOR_EMAILS = read("GUARDIAN_OPERATOR_EMAILS", items, "")
"""Addresses of operators, separated by commas. They get a copy of every notification."""

GUARDIAN_NO_CONSUMER_MINUTES = read("GUARDIAN_NO_CONSUMER_MINUTES", int, "0", least=0, most=525_600)
"""Minutes without a consumer after which a queue's owners are notified; 0: never."""

GUARDIAN_STALLED_MINUTES = read("GUARDIAN_STALLED_MINUTES", int, "0", least=0, most=525_600)
"""Minutes after which owners are notified that consumers acknowledge nothing while messages wait; 0: never. Set it
longer than the longest message takes."""

GUARDIAN_SNAPSHOT = read("GUARDIAN_SNAPSHOT", str, "management", choices=("management", "prometheus"))
"""The source of lengths. management: the list of queues, exact for classic queues. prometheus: the endpoint of each
node (rabbitmq_prometheus), which costs the broker a tenth and lags by seconds; the list is still fetched once a minute
and before a deletion."""

GUARDIAN_PROMETHEUS_URLS = read("GUARDIAN_PROMETHEUS_URLS", items, "", schemes=("http", "https"))
"""The nodes' Prometheus endpoints, separated by commas: http://rabbit-1:15692,http://rabbit-2:15692. Empty: Guardian
gets them from the management API. If a node has none, the list is used."""

## People

GUARDIAN_VOUCHED_DOMAINS = [ascii_domain(domain) for domain in read("GUARDIAN_VOUCHED_DOMAINS", items, "")]
"""Domains, separated by commas. Owners with a verified address of one of them have access to the broker."""

GUARDIAN_OWNERS_MAY_VOUCH = read("GUARDIAN_OWNERS_MAY_VOUCH", flag, "false")
"""Whether owners with access to the broker may grant it to others. Operators always may."""

GUARDIAN_RESERVED_USERS = read("GUARDIAN_RESERVED_USERS", items, "guest,admin")
"""Names that Pulse users created here can't have, separated by commas: names, or regular expressions that are searched
for in names, such as ^ops-. Case is ignored. An entry of letters, digits, dots, underscores and dashes is a name. An
expression can't contain a comma. A comma alone reserves no name."""

GUARDIAN_OWNERS_MAX_QUEUE_LENGTH = read("GUARDIAN_OWNERS_MAX_QUEUE_LENGTH", int, "0")
"""The highest deletion limit, in messages, that owners may set for their Pulse users; 0: owners set no limits."""

GUARDIAN_CHANNELS_MAY_BE_PRIVATE = read("GUARDIAN_CHANNELS_MAY_BE_PRIVATE", flag, "false")
"""Whether channels (chats, webhooks) may have private addresses, such as 10.0.0.7."""

GUARDIAN_REQUIRE_GENERATED_PASSWORDS = read("GUARDIAN_REQUIRE_GENERATED_PASSWORDS", flag, "false")
"""Whether passwords of Pulse users are always generated. Otherwise owners may choose their own."""

GUARDIAN_MAX_PULSE_USERS = read("GUARDIAN_MAX_PULSE_USERS", int, "20", least=0, most=1_000_000_000)
"""The maximum number of Pulse users of one owner; 0: no limit. Operators are exempt from this and all other quotas."""

GUARDIAN_MAX_TOKENS = read("GUARDIAN_MAX_TOKENS", int, "50", least=0, most=1_000_000_000)
"""The maximum number of valid tokens of one owner; 0: no limit."""

GUARDIAN_MAX_SUBSCRIPTIONS = read("GUARDIAN_MAX_SUBSCRIPTIONS", int, "500", least=0, most=1_000_000_000)
"""The maximum number of agents of one owner, and likewise of their services, processors, subscriptions, subscription
queues and consumer queues; 0: no limit."""

GUARDIAN_REGISTERED_QUEUE_TYPE = read("GUARDIAN_REGISTERED_QUEUE_TYPE", str, "classic", choices=("classic", "quorum"))
"""The type of the queues that agents register: classic or quorum. At the agent's next registration, an empty and unused
queue of the other type is replaced; if it has messages or a consumer, the registration is refused."""

GUARDIAN_MAX_CHANNELS = read("GUARDIAN_MAX_CHANNELS", int, "20", least=0, most=1_000_000_000)
"""The maximum number of channels of one owner; 0: no limit. Each channel gets every notification that its owner does
not turn off."""

GUARDIAN_EVENTS_PER_MINUTE = read("GUARDIAN_EVENTS_PER_MINUTE", int, "6000", least=0, most=1_000_000_000)
"""The maximum number of events that one owner may publish in a minute; 0: no limit."""

## Single sign-on

OIDC_ISSUER = read("OIDC_ISSUER", url, "", schemes=("http", "https"))
"""The address of the OpenID Connect issuer. Empty: people sign in with a code that is sent to them."""

OIDC_CLIENT_ID = read("OIDC_CLIENT_ID", str, "")
"""Guardian's client id at the issuer. The redirect address is GUARDIAN_BASE_URL/signin/oidc/callback/"""

OIDC_CLIENT_SECRET = read("OIDC_CLIENT_SECRET", str, "")
"""Guardian's client secret at the issuer."""

OIDC_NAME = read("OIDC_NAME", str, "single sign-on")
"""The name on the button: Sign in with …"""

OIDC_GROUPS_CLAIM = read("OIDC_GROUPS_CLAIM", str, "groups")
"""The claim that lists a person's groups."""

OIDC_VOUCHED_GROUPS = read("OIDC_VOUCHED_GROUPS", items, "")
"""Groups, separated by commas. Their members have access to the broker."""

## Mail

mail_settings = read("EMAIL_URL", mail_server, "consolemail://" if DEBUG else "smtp://127.0.0.1:25")
"""The mail server: smtp://user:password@host:25, smtp+tls://…:587 (STARTTLS) or smtps://…:465 (implicit TLS)."""

DEFAULT_FROM_EMAIL = read("DEFAULT_FROM_EMAIL", str, "guardian@localhost")
"""The sender of all mails."""

## Queues over HTTP

MESSAGE_STORE = read("MESSAGE_STORE", str, "database")
"""Where queues and their messages are stored. database: in the database of DATABASE_URL. cassandra: in the cluster of
CASSANDRA_HOSTS, for millions of queues."""

MESSAGE_STORE_DELAY_SECONDS = read(
    "MESSAGE_STORE_DELAY_SECONDS", number, "3" if MESSAGE_STORE == "cassandra" else "0", least=0, most=600
)
"""How many seconds a message is hidden from reads, so that a reader that continues after its last message misses none.
By default 3 with Cassandra, else 0. The clocks of Cassandra's nodes may differ by a third of it."""

CASSANDRA_HOSTS = read("CASSANDRA_HOSTS", items, "")
"""Nodes of the Cassandra cluster: host,host or host:port,host:port. Guardian finds the others."""

CASSANDRA_KEYSPACE = read("CASSANDRA_KEYSPACE", str, "guardian")
"""The keyspace, which `manage.py message_store_schema` creates and upgrades."""

CASSANDRA_DATACENTER = read("CASSANDRA_DATACENTER", str, "datacenter1")
"""The data centre of the nodes that this Guardian uses."""

CASSANDRA_REPLICATION = read("CASSANDRA_REPLICATION", str, "3")
"""The number of replicas of each message, with several data centres as dc1:3,dc2:3. One node needs 1."""

CASSANDRA_USER = read("CASSANDRA_USER", str, "")
"""The user on Cassandra, if it requires one."""

CASSANDRA_PASSWORD = read("CASSANDRA_PASSWORD", str, "")
"""The password of this user."""

CASSANDRA_TLS = read("CASSANDRA_TLS", flag, "false")
"""Connect to Cassandra with TLS. The certificates must name the addresses of the nodes, and be from an authority that
the system trusts, or of SSL_CERT_FILE."""

MESSAGE_STORE_MAX_BODY = read("MESSAGE_STORE_MAX_BODY", int, "1048576", least=1, most=1 << 27)
"""The maximum number of bytes in the body of one message or batch."""

MESSAGE_STORE_MAX_BYTES = read("MESSAGE_STORE_MAX_BYTES", int, "10737418240", least=0, most=1 << 60)
"""The maximum number of bytes of all messages of an application, where the body, the content type and 100 bytes more
count for each; 0: no limit."""

MESSAGE_STORE_POSTS_PER_MINUTE = read("MESSAGE_STORE_POSTS_PER_MINUTE", int, "60000", least=0, most=1_000_000_000)
"""The maximum number of requests of an application that post or overwrite messages, in a minute; and of those that
write positions or leases; 0: no limit."""

ZOOKEEPER_HOSTS = read("ZOOKEEPER_HOSTS", str, "")
"""ZooKeeper for the leases of `work_store`: host:port,host:port. Empty: leases are in the database."""

## Metrics, logs and errors

GUARDIAN_METRICS_TOKEN = read("GUARDIAN_METRICS_TOKEN", str, "")
"""The token that reads /metrics, as Authorization: Bearer TOKEN. Empty: only operators and Guardian's own machine may
read the metrics."""

LOG_FORMAT = read("LOG_FORMAT", str, "line", choices=("line", "json"))
"""line: a line for each event. json: a JSON object for each event."""

SENTRY_DSN = read("SENTRY_DSN", str, "")
"""The Sentry project that errors are reported to. Empty: none."""
