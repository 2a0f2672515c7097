"""The settings of Django and of the libraries, which follow from Guardian's own (``own_settings.py``).

The system checks in ``guardian_site/checks.py`` report errors, so these modules raise none.
"""

import os
from contextlib import suppress
from urllib.parse import urlsplit

from csp.constants import NONE, SELF
from kombu import Queue

from guardian_site import environment
from guardian_site.own_settings import *

# Settings with values that can't be read, and the reasons. They get their defaults, and the system checks fail.
UNREADABLE = environment.unreadable

# The web.
CSRF_TRUSTED_ORIGINS = ["://".join(urlsplit(GUARDIAN_BASE_URL)[:2])] if "://" in GUARDIAN_BASE_URL else []
SECURE_SSL_REDIRECT = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = uses_https
SECURE_REDIRECT_EXEMPT = [r"^(healthz|readyz|metrics)$"]  # local health checks use plain HTTP
SECURE_HSTS_SECONDS = 31_536_000 if uses_https else 0
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]  # HSTS for other hosts of the domain isn't ours to set
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if uses_https else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CSRF_COOKIE_HTTPONLY = True  # forms contain the token, and no script reads the cookie
SESSION_ENGINE = "accounts.signing_in.sessions"

INSTALLED_APPS = [
    "core",
    "accounts",
    "notifications",
    "queues",
    "agents",
    "installation",
    "status",
    "guardian_site",
    "message_store",
    "guardian_consumers",
    "guardian_consumers.processed",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "allauth",
    "allauth.account",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "csp",
    "auditlog",
    "django_filters",
    "django_htmx",
    "drf_spectacular",
    "rest_framework",
    "knox",
]

MIDDLEWARE = [
    "guardian_site.tracing.RequestId",
    "guardian_site.logs.AccessLog",
    "status.counters.CountRequests",
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "guardian_site.middleware.BodyLimits",
    "guardian_site.middleware.BrokerWait",
    "guardian_site.middleware.WrongKeyLimit",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "message_store.http.middleware.OptionalSlash",
    "guardian_site.middleware.CheckHost",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "accounts.audit.Middleware",
    "guardian_site.middleware.LocalTime",
    "guardian_site.middleware.KeepPagesPrivate",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "guardian_site.errors.BrokerErrors",
]

# No inline content, and none from other sites. Chromium applies form-action to a form's redirect too.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF],
        "font-src": [SELF],
        "connect-src": [SELF],
        "form-action": [SELF, *(["://".join(urlsplit(OIDC_ISSUER)[:2])] if OIDC_ISSUER else [])],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
    },
}

ROOT_URLCONF = "guardian_site.urls"
WSGI_APPLICATION = "guardian_site.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "guardian_site.context.navigation",
            ],
            "builtins": [
                "core.templatetags.components",
                "django.contrib.humanize.templatetags.humanize",
                "django.templatetags.static",
            ],
        },
    },
]

# The database. SQLite uses WAL, so that readers and the writer don't wait for each other. It uses IMMEDIATE, because a
# transaction that reads first and writes later fails if there is another writer, whatever the timeout.
DATABASES = {"default": default_database}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    with suppress(OSError):  # opening the database reports the error
        VAR_DIR.mkdir(parents=True, exist_ok=True)
    DATABASES["default"].setdefault("OPTIONS", {}).update(
        timeout=30,
        transaction_mode="IMMEDIATE",
        init_command="PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    )
else:
    DATABASES["default"].setdefault("OPTIONS", {}).setdefault("connect_timeout", 5)
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
    # A pool such as PgBouncer gives each transaction another connection. Guardian's queries need no such cursor.
    DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = True
# A new connection costs more than most requests: when the last connection closes, SQLite checkpoints its WAL.
DATABASES["default"]["CONN_MAX_AGE"] = 60
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Counts for limits, such as of attempts to sign in. The cache is in the database, so that all processes share them.
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "guardian_cache",
        # More entries are evicted before they expire. It is high, so that nobody can evict counts with many addresses.
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    },
}

AUTH_USER_MODEL = "accounts.Owner"
KNOX_TOKEN_MODEL = "accounts.AuthToken"  # noqa: S105 - a model, not a password
AUDITLOG_LOGENTRY_MODEL = "accounts.AuditEntry"
AUDITLOG_CID_GETTER = "guardian_site.tracing.current"  # the id in log lines
AUDITLOG_USE_FK_STRING_REPRESENTATION = True  # entries keep the names of deleted objects
# Don't create knox's and auditlog's own tables, which the swapped models replace.
MIGRATION_MODULES = {"knox": None, "auditlog": None}
# For passwords of RabbitMQ accounts. Owners sign in without a password.
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

# Sign-in by a code in an e-mail, or by OpenID Connect. Guardian's part is in accounts/signing_in/.
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "home"
SESSION_COOKIE_AGE = 14 * 24 * 3600
ACCOUNT_ADAPTER = "accounts.signing_in.codes.AccountAdapter"
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*"]
ACCOUNT_LOGIN_BY_CODE_ENABLED = True
ACCOUNT_LOGIN_BY_CODE_TIMEOUT = 600
ACCOUNT_EMAIL_VERIFICATION = "none"  # a sign-in verifies the address
ACCOUNT_EMAIL_UNKNOWN_ACCOUNTS = False  # the first sign-in creates the owner
ALLAUTH_TRUSTED_PROXY_COUNT = GUARDIAN_PROXIES  # a client can forge the part of X-Forwarded-For before theirs
# Limits count the clients of one network together. Providers give a customer an IPv6 network of up to this size.
ALLAUTH_RATE_LIMIT_IPV6_PREFIX = 48
ACCOUNT_EMAIL_SUBJECT_PREFIX = "[Guardian] "
SOCIALACCOUNT_ADAPTER = "accounts.signing_in.openid_connect.SocialAccountAdapter"
SOCIALACCOUNT_PROVIDERS = {
    "openid_connect": {
        "OAUTH_PKCE_ENABLED": True,
        "APPS": [
            {
                "provider_id": "oidc",
                "name": OIDC_NAME,
                "client_id": OIDC_CLIENT_ID,
                "secret": OIDC_CLIENT_SECRET,
                "settings": {"server_url": OIDC_ISSUER},
            }
        ]
        if OIDC_ISSUER
        else [],
    },
}

# The REST API. See core/rest.py and api_schema.py.
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "accounts.access.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated", "accounts.access.scopes.TokenScope"],
    "DEFAULT_PARSER_CLASSES": ["core.rest.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "core.rest.AlwaysJSONNegotiation",
    "DEFAULT_PAGINATION_CLASS": "core.rest.HeaderPagination",
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_METADATA_CLASS": "core.rest.MethodsMetadata",
    "DEFAULT_SCHEMA_CLASS": "guardian_site.api_schema.EndpointSchema",
    "EXCEPTION_HANDLER": "core.rest.exception_handler",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Guardian",
    "DESCRIPTION": (
        "Pulse users, queues and agents on a shared RabbitMQ. Authenticate with `Authorization: Token KEY`, or "
        "with the session of a signed-in browser. Lists are paginated arrays: `X-Result-Count` has the number of "
        "results, and `Link` the URLs of other pages. A UUID has 32 hex digits; in a path it may have dashes."
    ),
    "VERSION": "1",
    "SCHEMA_PATH_PREFIX": "/api",
    "SORT_OPERATIONS": False,  # keep the order of api_urls.py
    "ENUM_NAME_OVERRIDES": {
        "ArchiveReasonEnum": "queues.models.Archive.Reason",
        "EventKindEnum": "queues.models.QueueEvent.Kind",
        "ObjectTypeEnum": "agents.models.ObjectType",
        "ReplayStateEnum": "queues.models.Replay.State",
        "ServiceStateEnum": "agents.models.AgentService.State",
        "TokenScopeEnum": "accounts.models.AuthToken.Scope",
    },
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "guardian_site.api_schema.add_errors",
        "message_store.http.openapi.add_message_store",
        "guardian_site.api_schema.order_methods",
    ],
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],  # the schema contains no secret
}

LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static", ("help", BASE_DIR / "docs" / "pictures")]
WHITENOISE_ALLOW_ALL_ORIGINS = False  # other sites don't need the static files
WHITENOISE_USE_FINDERS = True  # serve static files without collectstatic

# Mail. The timeout is for mail servers that accept a connection and don't answer.
EMAIL_TIMEOUT = 10
vars().update(mail_settings)

# Celery. Its broker is never the guarded RabbitMQ, which blocks all publishers under a resource alarm.
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TIMEZONE = "UTC"
CELERY_TASK_PUBLISH_RETRY = False
# Workers and beat reconnect without a limit of attempts.
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# A prefetched task would wait for the running one. Tasks are acknowledged when they start: rows record what is to be
# done, so the next task finishes the work of a killed worker, and a task that kills its worker is not delivered again.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# Passes and deletions have queues of their own, and each a worker of its own in the Procfile, so that notifying never
# delays them, and deleting never delays passes. A worker without -Q consumes all queues.
CELERY_TASK_QUEUES = [Queue(name, routing_key=name) for name in ("celery", "guarding", "deleting")]
CELERY_TASK_ROUTES = {
    "queues.tasks.monitor_queues": {"queue": "guarding"},
    "queues.tasks.delete_queues": {"queue": "deleting"},
}
if CELERY_BROKER_URL.startswith("filesystem:"):
    _folders = {name: VAR_DIR / "celery" / name for name in ("messages", "control", "tmp")}
    for _folder in _folders.values():
        with suppress(OSError):
            _folder.mkdir(parents=True, exist_ok=True)
    CELERY_BROKER_TRANSPORT = "guardian_site.spool:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, str | float] = {
        "data_folder_in": str(_folders["messages"]),
        "data_folder_out": str(_folders["messages"]),
        "control_folder": str(_folders["control"]),
        "polling_interval": 0.2,
    }
    os.environ.setdefault("TMPDIR", str(_folders["tmp"]))
else:
    # Without these, a Redis that accepts a connection and doesn't answer blocks the publisher of a task for over 20 s.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 2, "socket_connect_timeout": 2, "max_retries": 0}
    with suppress(OSError):  # only beat needs the folder
        (VAR_DIR / "celery").mkdir(parents=True, exist_ok=True)
CELERY_BEAT_SCHEDULER = "guardian_site.beat:Scheduler"
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celery" / "beat-schedule")
CELERY_BEAT_SCHEDULE = {
    "pass": {
        "task": "queues.tasks.monitor_queues",
        "schedule": GUARDIAN_POLL_SECONDS,
        "options": {"expires": GUARDIAN_POLL_SECONDS},
    },
    "deletions": {"task": "queues.tasks.delete_queues", "schedule": 5, "options": {"expires": 5}},
    "notifications": {"task": "notifications.tasks.send_notifications", "schedule": 30, "options": {"expires": 30}},
    "pruning": {"task": "queues.tasks.prune", "schedule": 600, "options": {"expires": 600}},
    "replays": {"task": "queues.tasks.replay_archives", "schedule": 5, "options": {"expires": 5}},
    "moves": {"task": "queues.tasks.move_messages", "schedule": 5, "options": {"expires": 5}},
    "consumers": {"task": "queues.tasks.count_consumers", "schedule": 60, "options": {"expires": 60}},
    "weekly": {"task": "queues.tasks.tell_the_week", "schedule": 3600, "options": {"expires": 3600}},
    # Restarts don't delay these rare tasks: beat's schedule file stores their last run.
    "orphans": {"task": "agents.tasks.sweep_orphans", "schedule": 21_600, "options": {"expires": 21_600}},
    "stale": {"task": "agents.tasks.clean_up_stale", "schedule": 86_400, "options": {"expires": 86_400}},
    "removals": {"task": "core.tasks.finish_removals", "schedule": 60, "options": {"expires": 60}},
    "expired-passwords": {
        "task": "agents.tasks.revoke_expired_passwords",
        "schedule": 60,
        "options": {"expires": 60},
    },
    "visitors": {"task": "accounts.tasks.prune_visitors", "schedule": 3600, "options": {"expires": 3600}},
    "expired-messages": {"task": "message_store.tasks.remove_expired", "schedule": 60, "options": {"expires": 60}},
    "message-quotas": {"task": "message_store.tasks.measure_applications", "schedule": 60, "options": {"expires": 60}},
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"()": "guardian_site.logs.LineFormatter"},
        "json": {"()": "guardian_site.logs.JSONLinesFormatter"},
    },
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "json" if LOG_FORMAT == "json" else "line"},
    },
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        # Remove the handlers of these two, so that no line is logged twice.
        "django": {"handlers": [], "level": "INFO" if LOG_LEVEL == "DEBUG" else "NOTSET"},  # DEBUG logs all SQL
        "gunicorn.error": {"handlers": [], "propagate": True, "level": "NOTSET"},
        # guardian.requests logs each request.
        "django.request": {"level": "ERROR"},
        "django.security.DisallowedHost": {"level": "CRITICAL"},  # guardian_site.errors logs a line without a traceback
        "django.server": {"handlers": [], "level": "CRITICAL"},
        "httpcore": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
        "pika": {"level": "CRITICAL"},  # the callers log its errors
        "cassandra.cluster": {"level": "CRITICAL"},  # likewise
        "kombu.connection": {"level": "ERROR"},  # it warns that filesystem:// has no host
    },
}
