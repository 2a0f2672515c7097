"""Guardian's settings. Every one comes from the environment, or from ``.env`` beside ``manage.py``.

``.env.example`` lists them with a line of explanation each. What can be wrong with them is told by the
system checks in ``guardian_site/checks.py``, so nothing here raises.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()
environ.Env.read_env(BASE_DIR / ".env")

# The settings whose values can't be read, and why. Here their defaults hold, and the system checks refuse to go on.
UNREADABLE: dict[str, str] = {}


def read(name: str, cast: Callable[..., Any], default: Any) -> Any:
    """Return this setting as ``cast``, one of django-environ's readers, makes it of the text."""
    try:
        return cast(name, default=default)
    except (ValueError, ImproperlyConfigured) as error:
        # What can't be read of an address may be a part of its password.
        UNREADABLE[name] = "it is no such address" if name.endswith("_URL") else str(error)
        return cast("NO_SUCH_SETTING", default=default)


def items(name: str, default: list[str]) -> list[str]:
    """Return the items of this setting, which commas separate, with or without spaces."""
    return [item.strip() for item in env.list(name, default=default)]


def level(name: str, default: str) -> str:
    """Return a level of logging."""
    value: str = env.str(name, default=default).upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("it is DEBUG, INFO, WARNING or ERROR")
    return value


def address(name: str, default: str) -> str:
    """Return an address without a slash at its end."""
    value: str = env.str(name, default=default).rstrip("/")
    urlsplit(value)
    return value


def database(name: str, default: str) -> dict[str, Any]:
    """Return Django's settings of the database at this address."""
    settings: dict[str, Any] = env.db_url(name, default=default)
    if settings.get("ENGINE") not in ("django.db.backends.sqlite3", "django.db.backends.postgresql"):
        raise ValueError("it begins with sqlite:/// or postgres://")
    return settings


VAR_DIR = Path(env.str("GUARDIAN_VAR_DIR", default=str(BASE_DIR / "var")))

DEBUG = env.bool("DEBUG", default=False)

# Secrets have no default outside DEBUG.
SECRET_KEY = env.str("SECRET_KEY", default="insecure-and-for-debugging-only" if DEBUG else "")
RABBITMQ_MANAGEMENT_URL = env.str(
    "RABBITMQ_MANAGEMENT_URL", default="http://guest:guest@127.0.0.1:15672" if DEBUG else ""
)
RABBIT_URL = env.str("RABBIT_URL", default="amqp://guest:guest@127.0.0.1:5672" if DEBUG else "")

# What is guarded, and how. The rules that these feed are in queues/.
GUARDIAN_VHOSTS = items("GUARDIAN_VHOSTS", [])
GUARDIAN_PULSE_VHOST = env.str("GUARDIAN_PULSE_VHOST", default="/")
GUARDIAN_POLL_SECONDS = read("GUARDIAN_POLL_SECONDS", env.float, 5.0)
GUARDIAN_POLL_MAX_SECONDS = read("GUARDIAN_POLL_MAX_SECONDS", env.float, 60.0)
GUARDIAN_BROKER_TIMEOUT_SECONDS = read("GUARDIAN_BROKER_TIMEOUT_SECONDS", env.float, 20.0)
GUARDIAN_WARN_QUEUE_LENGTH = read("GUARDIAN_WARN_QUEUE_LENGTH", env.int, 2000)
GUARDIAN_MAX_QUEUE_LENGTH = read("GUARDIAN_MAX_QUEUE_LENGTH", env.int, 8000)
GUARDIAN_THRESHOLD_POLICY = env.str("GUARDIAN_THRESHOLD_POLICY", default="static")
GUARDIAN_QUIET_SECONDS = read("GUARDIAN_QUIET_SECONDS", env.int, 900)
GUARDIAN_DELETE_BRAKE = read("GUARDIAN_DELETE_BRAKE", env.int, 50)
GUARDIAN_NAMESPACE_POLICY = env.str("GUARDIAN_NAMESPACE_POLICY", default="report")
GUARDIAN_IGNORED_QUEUES = env.str("GUARDIAN_IGNORED_QUEUES", default="")
GUARDIAN_FORGET_DAYS = read("GUARDIAN_FORGET_DAYS", env.int, 30)
GUARDIAN_OPERATOR_EMAILS = items("GUARDIAN_OPERATOR_EMAILS", [])

# The web.
GUARDIAN_BASE_URL = read("GUARDIAN_BASE_URL", address, "http://127.0.0.1:8000")
ALLOWED_HOSTS = items("ALLOWED_HOSTS", [urlsplit(GUARDIAN_BASE_URL).hostname or "127.0.0.1"])
_HTTPS = GUARDIAN_BASE_URL.startswith("https://")
CSRF_TRUSTED_ORIGINS = ["://".join(urlsplit(GUARDIAN_BASE_URL)[:2])] if "://" in GUARDIAN_BASE_URL else []
SECURE_SSL_REDIRECT = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _HTTPS
SECURE_REDIRECT_EXEMPT = [r"^(healthz|readyz)$"]  # a health check inside the machine speaks plain HTTP
SECURE_HSTS_SECONDS = 31_536_000 if _HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = _HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _HTTPS else None
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

INSTALLED_APPS = [
    "accounts",
    "queues",
    "guardian_site",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "rest_framework",
    "knox",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

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
            ],
        },
    },
]

# The database. On SQLite: WAL, so that readers and the writer don't wait for each other, and IMMEDIATE, because a
# transaction that reads first and writes later is otherwise refused under a second writer, whatever the timeout.
DATABASES = {"default": read("DATABASE_URL", database, f"sqlite:///{VAR_DIR / 'guardian.sqlite3'}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    VAR_DIR.mkdir(parents=True, exist_ok=True)
    DATABASES["default"].setdefault("OPTIONS", {}).update(
        timeout=30,
        transaction_mode="IMMEDIATE",
        init_command="PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    )
else:
    DATABASES["default"].setdefault("OPTIONS", {}).setdefault("connect_timeout", 5)
    DATABASES["default"]["CONN_MAX_AGE"] = 60
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.Owner"
LOGIN_URL = "admin:login"
KNOX_TOKEN_MODEL = "accounts.AuthToken"  # noqa: S105 - a model, not a password
MIGRATION_MODULES = {"knox": None}  # they make its own token table, swapped or not, which nothing would use
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
WHITENOISE_USE_FINDERS = True  # static files are served as they lie, without a collectstatic step

# Mail. A mail server that accepts and says nothing must not hold the sender for ever.
EMAIL_TIMEOUT = 10
vars().update(read("EMAIL_URL", env.email_url, "consolemail://" if DEBUG else "smtp://127.0.0.1:25"))
DEFAULT_FROM_EMAIL = env.str("DEFAULT_FROM_EMAIL", default="guardian@localhost")

# Celery. Its broker is never the RabbitMQ that is guarded: under a resource alarm every publisher there is blocked.
CELERY_BROKER_URL = env.str("CELERY_BROKER_URL", default="filesystem://")
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"
CELERY_TASK_PUBLISH_RETRY = False
if CELERY_BROKER_URL.startswith("filesystem:"):
    _folders = {name: VAR_DIR / "celery" / name for name in ("messages", "control", "tmp")}
    for _folder in _folders.values():
        _folder.mkdir(parents=True, exist_ok=True)
    CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, str | float] = {
        "data_folder_in": str(_folders["messages"]),
        "data_folder_out": str(_folders["messages"]),
        "control_folder": str(_folders["control"]),
        "polling_interval": 0.2,
    }
    os.environ.setdefault("TMPDIR", str(_folders["tmp"]))
else:
    # Without these, a Redis that accepts and says nothing holds whoever hands over a task for over 20 seconds.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 2, "socket_connect_timeout": 2, "max_retries": 0}
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celery" / "beat-schedule")
CELERY_BEAT_SCHEDULE = {
    "pass": {
        "task": "queues.tasks.monitor_queues",
        "schedule": GUARDIAN_POLL_SECONDS,
        "options": {"expires": GUARDIAN_POLL_SECONDS},
    },
    "notifications": {"task": "queues.tasks.send_notifications", "schedule": 30, "options": {"expires": 30}},
    "pruning": {"task": "queues.tasks.prune", "schedule": 600, "options": {"expires": 600}},
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": read("LOG_LEVEL", level, "INFO")},
    "loggers": {
        "httpx": {"level": "WARNING"},
        "pika": {"level": "ERROR"},  # what goes wrong is told by the code that called it
        "kombu.connection": {"level": "ERROR"},  # a file system has no host name, and that is all right
    },
}
