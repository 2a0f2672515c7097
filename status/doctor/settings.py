"""What ``doctor`` checks of the settings and folders."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.http.request import split_domain_port, validate_host

from core.addresses import is_loopback
from core.certificates import store_error
from status import counters, facts, rules
from status.doctor.findings import Finding, Findings, Status, findings_of


def check_settings() -> Findings:
    messages = [message for message in run_checks() if str(message.id).startswith("guardian.")]
    for message in messages:
        status = Status.PROBLEM if message.level >= ERROR else Status.WARNING
        yield Finding("settings", status, str(message.msg), str(message.hint or "See .env.example."))
    if not messages:
        yield Finding("settings", Status.OK, "they are valid, as far as Guardian can check them alone")
    yield _debug()
    yield from _secret_key()
    yield from _base_url()
    yield from _certificates()
    yield from _folders()


def _debug() -> Finding:
    if settings.DEBUG:
        advice = "Turn DEBUG off in production: with it, error pages show the settings to everybody."
        return Finding("debug", Status.WARNING, "DEBUG is on", advice)
    return Finding("debug", Status.OK, "DEBUG is off")


def _secret_key() -> Findings:
    try:
        key = settings.SECRET_KEY
    except ImproperlyConfigured:
        return  # it is empty, which the findings of "settings" report
    if settings.DEBUG or (len(key) >= 40 and len(set(key)) > 5):
        yield Finding("secret key", Status.OK, "SECRET_KEY is set")
    else:
        advice = "Set it to a random text of 40 characters or more. Anybody who guesses it can sign in as any user."
        yield Finding("secret key", Status.WARNING, "SECRET_KEY is short, or has few different characters", advice)


def _base_url() -> Findings:
    url = urlsplit(settings.GUARDIAN_BASE_URL)
    if not url.hostname:
        return  # the findings of "settings" report it
    if not _is_allowed(split_domain_port(url.netloc)[0]):
        advice = "Add the host to ALLOWED_HOSTS, or leave ALLOWED_HOSTS out. Until then each request gets a 400."
        found = f"ALLOWED_HOSTS lacks {url.hostname}, the host of GUARDIAN_BASE_URL"
        yield Finding("address", Status.PROBLEM, found, advice)
        return
    is_local = is_loopback(url.hostname)
    if settings.DEBUG or (url.scheme == "https" and not is_local):
        yield Finding("address", Status.OK, f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}")
    elif is_local:
        found = f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}, which works on this machine only"
        advice = "Set it to the address that people use: links in mails begin with it."
        yield Finding("address", Status.WARNING, found, advice)
    else:
        found = f"GUARDIAN_BASE_URL is {settings.GUARDIAN_BASE_URL}: passwords and tokens are sent unencrypted"
        advice = (
            "Run Guardian behind a proxy that terminates TLS, and set an https:// address. This also turns on "
            "redirects, HSTS and Secure cookies."
        )
        yield Finding("address", Status.WARNING, found, advice)


def _is_allowed(host: str) -> bool:
    return validate_host(host, settings.ALLOWED_HOSTS) or (settings.DEBUG and not settings.ALLOWED_HOSTS)


def _certificates() -> Findings:
    if error := store_error():
        advice = (
            "Name a readable file of certificates in PEM format, or unset it. Until then no certificate is trusted."
        )
        yield Finding("certificates", Status.PROBLEM, error, advice)


def _folders() -> Findings:
    """Check GUARDIAN_VAR_DIR and the folders in it: an account other than Guardian's may have created one."""
    folder = Path(settings.VAR_DIR)
    with suppress(OSError):  # writing reports it
        folder.mkdir(parents=True, exist_ok=True)
    used = {folder, counters.FOLDER, Path(settings.CELERY_BEAT_SCHEDULE_FILENAME).parent}
    used |= {Path(str(value)) for name, value in settings.CELERY_BROKER_TRANSPORT_OPTIONS.items() if "folder" in name}
    written = [
        facts.attempt(rules.FOLDER, partial(facts.write_to_folder, one), folder=str(one)).verdict
        for one in sorted(used)
        if one == folder or one.exists()
    ]
    yield from findings_of(written)
