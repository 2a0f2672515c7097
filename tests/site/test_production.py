"""Production: the image, Docker Compose, systemd, and the steps of the image without a container."""

import configparser
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from core.leases import LEASE_SECONDS
from deploy import healthcheck
from tests.support.recorder import Recorder
from tests.support.served import run_python
from tests.support.toolbox import wait_until
from tools import stack
from tools.postgresql import PrivateCluster
from tools.processes import ProcessGroup, free_port
from tools.redis import PrivateRedis

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
SYSTEMD = PROJECT / "deploy" / "systemd"
PRODUCTION = PROJECT / "var" / "production"
PACKAGES = sorted(path.parent for path in PROJECT.glob("packages/*/pyproject.toml"))

SETTINGS = set(re.findall(r"^# ([A-Z_]+)=", (PROJECT / ".env.example").read_text(), re.M))
PROCFILE = dict(re.findall(r"^(\w+): (.+)$", (PROJECT / "Procfile").read_text(), re.M))
MIGRATE = shlex.split(PROCFILE.pop("release").partition(" && ")[0])
COMMANDS = {name: shlex.split(command) for name, command in PROCFILE.items()}

PRODUCTION_SETTINGS = {
    "SECRET_KEY": "jf93kd02Lqpx84mvbn27sUEwz61tyRAcgh5K-0oiYHdNPlTGFVXBJMQC",
    "RABBITMQ_MANAGEMENT_URL": "http://guardian:word@rabbitmq:15672",
    "RABBIT_URL": "amqp://guardian:word@rabbitmq:5672",
    "CELERY_BROKER_URL": "redis://redis:6379/0",
    "DATABASE_URL": "postgres://guardian:word@postgres:5432/guardian",
    "EMAIL_URL": "smtp://mail.example.org:25",
    "DEFAULT_FROM_EMAIL": "guardian@example.org",
    "GUARDIAN_BASE_URL": "https://guardian.example.org",
    "GUARDIAN_OPERATOR_EMAILS": "ops@example.org",
    "GUARDIAN_METRICS_TOKEN": "ametricstoken",
}


def environment(**settings):
    """Return the environment of a production process: these settings, defaults for the others, nothing of .env."""
    computed = {"SECRET_KEY", "GUARDIAN_PROXIES", "GUARDIAN_VAR_DIR", "ALLOWED_HOSTS", "MESSAGE_STORE_DELAY_SECONDS"}
    unset = dict.fromkeys(SETTINGS - computed)
    defaults = dict(re.findall(r"^# ([A-Z_]+)=(.+)$", (PROJECT / ".env.example").read_text(), re.M))
    blank = {name: "" for name in unset if name not in defaults}
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **defaults, **blank, **PRODUCTION_SETTINGS, **settings}


# Lock files


def locked_packages(name):
    """Return the packages of a lock file, each with its version and hashes."""
    text = (PROJECT / name).read_text().strip()
    return {block.partition("==")[0]: block for block in re.split(r"\n(?=\S)", text)}


@pytest.mark.parametrize("lock", ["requirements-production.lock", "requirements-build.lock"])
def test_the_locks_of_the_image_agree_with_requirements_lock(lock):
    of_the_image, everything = locked_packages(lock), locked_packages("requirements.lock")
    assert of_the_image
    for name, block in of_the_image.items():
        assert everything[name] == block
        assert "--hash=sha256:" in block
    assert "://" not in (PROJECT / lock).read_text()


def names_in(requirements):
    return {re.split(r"[\[<>=]", one)[0] for one in requirements}


def test_the_production_lock_has_dependencies_but_no_test_packages():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    locked = set(locked_packages("requirements-production.lock"))
    assert names_in(project["project"]["dependencies"]) <= locked
    assert not names_in(project["dependency-groups"]["dev"]) & locked


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_locks_have_dependencies_and_build_tools_of_our_packages(package):
    text = tomllib.loads((package / "pyproject.toml").read_text())
    extras = text["project"].get("optional-dependencies", {}).values()
    needed = names_in(itertools.chain(text["project"]["dependencies"], *extras))
    assert needed <= set(locked_packages("requirements-production.lock"))
    assert names_in(text["build-system"]["requires"]) <= set(locked_packages("requirements-build.lock"))


# The image


def instructions(text):
    """Return the instructions of a Dockerfile as (instruction, rest)."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


DOCKERFILE = instructions((PROJECT / "Dockerfile").read_text())
LAST_STAGE = DOCKERFILE[max(i for i, (word, _) in enumerate(DOCKERFILE) if word == "FROM") :]


def test_the_image_installs_only_locked_packages_with_hashes():
    steps = [rest for word, rest in DOCKERFILE if word == "RUN" and "pip " in rest]
    from_an_index = [step for step in steps if "--no-index" not in step]
    assert all("pip install" in step and "--require-hashes" in step for step in from_an_index)
    assert {step.split(" -r ")[1]: step.split()[0] for step in from_an_index} == {
        "requirements-production.lock": "/packages/bin/pip",
        "requirements-build.lock": "pip",
    }
    assert not [rest for word, rest in LAST_STAGE if "pip" in rest]


def test_the_image_runs_as_a_user_that_cannot_change_the_code():
    words = [word for word, _ in LAST_STAGE]
    assert dict(LAST_STAGE)["USER"] == "guardian"
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    assert not [rest for word, rest in LAST_STAGE if word == "COPY" and "--chown" in rest]


def test_the_image_starts_the_procfiles_web_process_with_a_health_check():
    last = dict(LAST_STAGE)
    assert json.loads(last["CMD"]) == [part.replace("${PORT:-8000}", "8000") for part in COMMANDS["web"]]
    health = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert health[0] == "python"
    assert (PROJECT / health[1]).exists()


def ignored(path):
    """Return whether .dockerignore excludes this path from the image."""
    out = False
    for pattern in (PROJECT / ".dockerignore").read_text().splitlines():
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        candidates = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if pattern.startswith("**/"):
            candidates += parts
        # Docker's * stops at a slash.
        matching = [one for one in candidates if one.count("/") == wanted.count("/") and fnmatch.fnmatch(one, wanted)]
        if matching:
            out = pattern.startswith("!") is False
    return out


@pytest.mark.parametrize(
    "path",
    [".env", ".git/config", ".venv/bin/python", "guardian.env", "var/guardian.sqlite3", "guardian.dump", "guardian.sql",
     "backup.sqlite3", "tests/conftest.py",
     "tools/benchmarks/load.py", "tools/run.py", "requirements.lock", "queues/__pycache__/models.pyc"],
)  # fmt: skip
def test_secrets_data_and_tests_are_not_in_the_image(path):
    assert ignored(path)


# Docker Compose


COMPOSE = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
OUR_SERVICES = {name: service for name, service in SERVICES.items() if service.get("build")}


def command_of(service):
    return [str(part) for part in service["command"]]


@pytest.mark.parametrize("name", ["guard", "deleter", "worker", "beat"])
def test_a_service_runs_the_procfiles_command(name):
    assert command_of(OUR_SERVICES[name]) == COMMANDS[name]


def test_a_worker_of_the_store_starts_with_its_profile_and_has_time_to_end():
    assert OUR_SERVICES["store"]["profiles"] == ["store"]
    assert seconds(OUR_SERVICES["store"]["stop_grace_period"]) > 60


def test_migrations_run_after_the_database_and_before_the_other_services():
    assert command_of(OUR_SERVICES["migrate"]) == MIGRATE
    assert OUR_SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert "rabbitmq" not in OUR_SERVICES["migrate"]["depends_on"]  # an override file may leave it out
    assert OUR_SERVICES["migrate"]["restart"].startswith("on-failure")
    for name in OUR_SERVICES.keys() - {"migrate"}:
        assert OUR_SERVICES[name]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}


@pytest.mark.parametrize("name", sorted(OUR_SERVICES))
def test_every_environment_variable_of_a_service_is_a_setting(name):
    assert set(OUR_SERVICES[name]["environment"]) <= SETTINGS
    assert set(OUR_SERVICES[name]["environment"]) == {"CELERY_BROKER_URL", "GUARDIAN_BASE_URL", "LOG_FORMAT"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_secret_is_in_the_environment_of_a_container(name):
    assert "env_file" not in SERVICES[name]
    given = SERVICES[name].get("environment", {})
    assert not [one for one in given if re.search("PASS|KEY|TOKEN|DSN", one) and not one.endswith("_FILE")]
    assert not [one for one in given.values() if re.search(r"://[^/]*@|PASS|KEY|TOKEN", one)]


def secret_files(name):
    """Return the files with a service's secrets and their paths in the container."""
    volumes = [one for one in SERVICES[name]["volumes"] if isinstance(one, dict)]
    for one in volumes:
        assert (one["type"], one["read_only"], one["bind"]) == ("bind", True, {"create_host_path": False})
    folder = '${SECRETS_FOLDER:?run "make compose-secrets" first}'
    assert all(one["source"].startswith(f"{folder}/") for one in volumes)
    return {one["source"].replace(folder, "secrets"): one["target"] for one in volumes}


def test_each_service_reads_its_secrets_from_a_file(tmp_path):
    for name in OUR_SERVICES:
        assert secret_files(name) == {"secrets/guardian.env": f"{dict(LAST_STAGE)['WORKDIR']}/.env"}
    [password] = secret_files("postgres").values()
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == password
    assert secret_files("rabbitmq") == {"secrets/rabbitmq.conf": "/etc/rabbitmq/conf.d/20-guardian.conf"}
    assert ignored("secrets/guardian.env")
    assert "secrets/" in (PROJECT / ".gitignore").read_text().splitlines()


def test_the_broker_listens_on_localhost_by_default():
    assert SERVICES["rabbitmq"]["ports"] == [f"${{BROKER_ADDRESS:-127.0.0.1}}:{port}:{port}" for port in (5672, 15674)]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - set(OUR_SERVICES)))
def test_third_party_images_have_a_version(name):
    image, _, tag = SERVICES[name]["image"].partition(":")
    assert re.match(r"\d", tag), f"{image} has the tag {tag!r}"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_restarts_rotates_its_log_and_has_bounded_memory(name):
    service = SERVICES[name]
    assert service["restart"] == ("on-failure:5" if name == "migrate" else "unless-stopped")
    assert service["logging"] == {"driver": "local", "options": {"max-size": "10m", "max-file": "5"}}
    assert service["mem_limit"]


@pytest.mark.parametrize(
    ("schema", "path"),
    [("compose-spec", "docker-compose.yml"), ("github-workflows", ".github/workflows/ci.yml")],
)
def test_a_file_agrees_with_its_schema(schema, path):
    checked = run_python(dict(os.environ), "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path)
    assert checked.returncode == 0, checked.stdout


def test_only_the_broker_and_the_proxy_publish_ports():
    assert {name for name, service in SERVICES.items() if service.get("ports")} == {"rabbitmq", "proxy"}
    assert SERVICES["proxy"]["ports"] == ["${GUARDIAN_WEB_PORTS:-127.0.0.1:8000}:8080"]


def test_make_run_listens_on_this_machine_only():
    with stack._listen(8000) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_requirements_of_a_buildpack_are_the_locks_of_the_image():
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "-r requirements-production.lock",
        "-r requirements-build.lock",
    ]
    for package in PACKAGES:
        assert f" ./{package.relative_to(PROJECT)}" in (PROJECT / "bin" / "post_compile").read_text()


def seconds(text):
    minutes, rest = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text).groups()
    return int(minutes or 0) * 60 + int(rest or 0)


@pytest.mark.parametrize("name", sorted(OUR_SERVICES))
def test_our_containers_are_read_only_without_capabilities(name):
    assert OUR_SERVICES[name]["read_only"] is True
    assert [one for one in OUR_SERVICES[name]["volumes"] if isinstance(one, str)] == ["guardian:/var/lib/guardian"]
    assert dict(LAST_STAGE)["ENV"].endswith("GUARDIAN_VAR_DIR=/var/lib/guardian")
    assert OUR_SERVICES[name]["cap_drop"] == ["ALL"]
    assert OUR_SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


# systemd


class Unit(configparser.RawConfigParser):
    """A systemd unit, read from several files; a later value replaces an earlier one."""

    def __init__(self, *paths):
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",), interpolation=None)
        self.optionxform = str
        for path in paths:
            self.read_string(path.read_text())


SERVICE_UNITS = sorted(SYSTEMD.glob("*.service"))
COMMON = SYSTEMD / "guardian-.service.d" / "common.conf"


def unit(name):
    return Unit(COMMON, SYSTEMD / name)


@pytest.mark.parametrize("name", ["web@", "guard@", "deleter@", "worker@", "beat"])
def test_a_unit_starts_the_procfiles_command(name):
    program, *arguments = shlex.split(unit(f"guardian-{name}.service")["Service"]["ExecStart"])
    expected = list(COMMANDS[name.rstrip("@")])
    if name == "web@":
        at = expected.index("--bind")
        del expected[at : at + 2]  # systemd provides the socket
    of_this_machine = [re.sub(r"-%i@%%h$", "@%h", argument) for argument in arguments]
    assert [program.removeprefix("/opt/guardian/.venv/bin/"), *of_this_machine] == expected
    assert (Path(sys.executable).parent / Path(program).name).exists()


@pytest.mark.parametrize("path", SERVICE_UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened_and_stops_gracefully(path):
    service = unit(path.name)["Service"]
    assert service["User"] == "guardian"
    assert service["EnvironmentFile"] == "/etc/guardian/guardian.env"
    for name, value in (
        ("NoNewPrivileges", "yes"), ("ProtectSystem", "strict"), ("PrivateTmp", "yes"), ("ProtectHome", "yes"),
        ("CapabilityBoundingSet", ""), ("KillMode", "mixed"), ("KillSignal", "SIGTERM"),
    ):  # fmt: skip
        assert service[name] == value
    assert service["Restart"] in ("always", "on-failure")
    assert unit(path.name)["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit(path.name)["Install"]["WantedBy"] == "guardian.target"


@pytest.mark.parametrize(
    ("name", "longest"),
    [("guard", LEASE_SECONDS), ("worker", LEASE_SECONDS), ("web", 30)],
    ids=["guard", "worker", "web"],
)
def test_a_process_has_time_to_finish_a_pass_or_a_request(name, longest):
    assert seconds(OUR_SERVICES[name]["stop_grace_period"]) > longest
    assert int(unit(f"guardian-{name}@.service")["Service"]["TimeoutStopSec"]) > longest


@pytest.mark.parametrize("name", ["web@", "guard@", "worker@", "store@", "beat"])
def test_a_unit_waits_for_migrations(name):
    path = f"guardian-{name}.service"
    assert unit(path)["Service"]["ExecStartPre"].endswith("manage.py migrate --check")
    assert "guardian-migrate.service" in Unit(SYSTEMD / path)["Unit"]["After"]


@pytest.fixture
def installed_units(tmp_path):
    """Give a folder with the installed units; /bin/true replaces the programs, which this machine lacks."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    shutil.copytree(SYSTEMD, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.service"):
        path.write_text(re.sub(r"/opt/guardian/\.venv/bin/\w+", "/bin/true", path.read_text()))
    names = []
    for path in sorted(tmp_path.glob("guardian*.*")):
        if path.is_file():
            name = path.name.replace("@.", "@8000.")
            path.rename(tmp_path / name)
            names.append(name)
    return tmp_path, names


def analyze(folder, *arguments):
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_systemd_analyze_verifies_the_units(installed_units):
    folder, names = installed_units
    verified = analyze(folder, "verify", *names)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_units_have_a_low_exposure_level(installed_units):
    folder, names = installed_units
    for name in [name for name in names if name.endswith(".service")]:
        answer = analyze(folder, "security", "--offline=true", "--threshold=20", name)
        assert answer.returncode == 0, answer.stdout[-500:]


# Settings


def check(**settings):
    return run_python(environment(**settings), "manage.py", "check", "--deploy", "--fail-level", "WARNING")


def test_production_settings_pass_the_checks_for_deployment(tmp_path):
    good = check(GUARDIAN_VAR_DIR=str(tmp_path))
    assert good.returncode == 0, good.stderr
    bad = check(GUARDIAN_VAR_DIR=str(tmp_path), GUARDIAN_BASE_URL="http://guardian.example.org")
    assert bad.returncode == 1
    assert "security.W" in bad.stderr


# The steps of the image, without Docker


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Give the image's folder: the files that .dockerignore includes, without the sources of our packages."""
    assert (PRODUCTION / "installed").exists(), f"{PRODUCTION} is missing: `make production-packages` makes it"
    folder = tmp_path_factory.mktemp("image") / "guardian"
    folder.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (PROJECT / name).is_file() and not ignored(name) and not name.startswith("packages/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
    return folder


def sign_in(client, link):
    """Press the button of a sign-in link like a browser behind a proxy that ends TLS. Return the answer."""
    path = link.removeprefix("https://guardian.example.org")
    button = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', client.get(path).text)
    # Secure cookies are not sent over the plain connection, so name them here.
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in client.cookies.jar)
    answer = client.post(path, data={"csrfmiddlewaretoken": button[1]}, headers={"Cookie": cookies, "Referer": link})
    assert answer.status_code == 302
    client.headers["Cookie"] = "; ".join(f"{cookie.name}={cookie.value}" for cookie in client.cookies.jar)
    return answer


def test_the_steps_of_the_image_start_a_working_guardian_behind_https(installed, tmp_path):
    program = PRODUCTION / "bin"
    for absent in ("pytest", "hatchling"):
        imported = subprocess.run([program / "python", "-c", f"import {absent}"], capture_output=True, check=False)
        assert imported.returncode == 1
    with PrivateCluster() as cluster, PrivateRedis() as redis:
        settings = environment(
            DATABASE_URL=cluster.create_database("guardian"),
            CELERY_BROKER_URL=redis.url,
            GUARDIAN_VAR_DIR=str(tmp_path),
        )

        def manage(*arguments):
            return subprocess.run(
                [program / "python", "manage.py", *arguments],
                cwd=installed, env=settings, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip

        checked = manage("check", "--deploy", "--fail-level", "WARNING")
        assert checked.returncode == 0, checked.stderr
        assert manage("migrate", "--check").returncode == 1
        migrated = manage("migrate", "--no-input")
        assert migrated.returncode == 0, migrated.stderr
        assert manage("migrate", "--check").returncode == 0

        port = free_port()
        web = [part.replace("0.0.0.0:${PORT:-8000}", f"127.0.0.1:{port}") for part in COMMANDS["web"]]
        group = ProcessGroup(settings, directory=installed, logs=tmp_path / "log")
        for name, command in {**COMMANDS, "web": web}.items():
            group.start(name, [program / command[0], *command[1:]])
        try:
            wait_until(lambda: group.ended() or healthcheck.problem(port) == "", seconds=60)
            assert not group.ended(), group.log("web").read_text()
            health = [program / "python", "deploy/healthcheck.py", str(port)]
            assert subprocess.run(health, cwd=installed, env=settings, check=False).returncode == 0
            through_the_proxy = {
                "Host": "guardian.example.org", "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1",
            }  # fmt: skip
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=through_the_proxy, trust_env=False
            ) as client:
                page = client.get("/")
                assert page.status_code == 200
                assert page.headers["Strict-Transport-Security"] == "max-age=31536000"
                form = client.get("/signin/")
                assert re.match("csrftoken=.*HttpOnly; .*SameSite=Lax; Secure", form.headers["Set-Cookie"])
                linked = manage("create_owner", "ops@example.org", "--operator")
                assert linked.returncode == 0, linked.stderr
                signed_in = sign_in(client, manage("login_link", "ops@example.org").stdout.strip())
                assert re.search("sessionid=.*HttpOnly; .*SameSite=Lax; Secure", signed_in.headers["Set-Cookie"])
                help_page = client.get("/help/owners/")
                assert help_page.status_code == 200
                assets = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text + help_page.text)
                assert assets
                for asset in assets:
                    assert client.get(asset).status_code == 200
                ready = client.get("/readyz").json()
                assert (ready["database"], ready["task_queue"]) == (True, True)
                assert client.get("/", headers={"Host": "other.example.org"}).status_code == 400
                assert client.get("/", headers={"X-Forwarded-Proto": "http"}).status_code == 301
            # The worker's health check of docker-compose.yml.
            host = os.uname().nodename
            for name in ("guard", "worker"):
                ping = [program / "celery", "-A", "guardian_site", "inspect", "ping", "--destination", f"{name}@{host}"]
                deadline = time.monotonic() + 60
                while (answer := subprocess.run(ping, cwd=installed, env=settings, capture_output=True)).returncode:
                    assert time.monotonic() < deadline, answer.stdout
            assert not group.ended()
            assert {name: group.end(name, 60) for name in COMMANDS} == dict.fromkeys(COMMANDS, 0)
            assert list((tmp_path / "celery").glob("beat-schedule*"))
        finally:
            group.stop()


# Heroku and similar platforms


@contextmanager
def web_of_the_procfile(folder, settings, logs, command):
    """Run a command that starts the web process of the Procfile, and give a client of it."""
    group = ProcessGroup(settings, directory=folder, logs=logs)
    group.start("web", command)
    through_the_router = {"Host": "guardian.example.org", "X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
    try:
        wait_until(lambda: group.ended() or healthcheck.problem(int(settings["PORT"])) == "", seconds=60)
        site = f"http://127.0.0.1:{settings['PORT']}"
        with httpx.Client(base_url=site, headers=through_the_router, trust_env=False) as client:
            yield client
        assert not group.ended(), group.log("web").read_text()
    finally:
        group.stop()


def test_the_procfile_works_on_a_disk_that_each_restart_empties(installed, tmp_path):
    with PrivateCluster() as cluster, PrivateRedis() as redis:
        settings = environment(
            PATH=f"{PRODUCTION / 'bin'}:{os.defpath}",
            PORT=str(free_port()),
            DATABASE_URL=cluster.create_database("guardian"),
            CELERY_BROKER_URL=redis.url,
            GUARDIAN_VAR_DIR=str(tmp_path / "var"),
        )
        token = {"Authorization": f"Bearer {settings['GUARDIAN_METRICS_TOKEN']}"}

        def shell(command):
            done = subprocess.run(
                ["sh", "-c", command], cwd=installed, env=settings, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        shell(shlex.join(MIGRATE))
        web = ["sh", "-c", f"exec {PROCFILE['web']}"]
        with web_of_the_procfile(installed, settings, tmp_path / "first", web) as client:
            shell("python manage.py create_owner ops@example.org --operator")
            sign_in(client, shell("python manage.py login_link ops@example.org"))
            cookies = client.headers["Cookie"]
        shutil.rmtree(tmp_path / "var")
        everything = [sys.executable, "-m", "honcho", "start", "--procfile", PROJECT / "Procfile"]
        with web_of_the_procfile(installed, settings, tmp_path / "second", everything) as client:
            wait_until(lambda: "No migrations to apply" in (tmp_path / "second" / "web.log").read_text())
            assert "ops@example.org" in client.get("/queues/", headers={"Cookie": cookies}).text
            assert "guardian_passes_total" in client.get("/metrics", headers=token).text


# The health check


def test_the_health_check_reports_another_status_than_200():
    with Recorder() as healthy, Recorder(status=400) as refusing:
        assert healthcheck.problem(healthy.port) == ""
        assert "answered 400" in healthcheck.problem(refusing.port)
    [request] = healthy.received
    assert (request.path, request.headers["Host"]) == ("/healthz", f"127.0.0.1:{healthy.port}")
