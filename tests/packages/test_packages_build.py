"""The distributions in packages/ build, and their wheels work in an environment without Django."""

import email
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from message_store import applications
from tests.support.consumers import settings_at
from tests.support.toolbox import wait_until
from tools import no_package

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
NAMES = ["guardian-consumers", "guardian-store"]


class Built(NamedTuple):
    sdist: Path
    wheel: Path


class Installed(NamedTuple):
    python: Path
    readme: list[str]
    """The programs in the package's README."""


def hatchling(target, source, to, **environment):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", to]
    subprocess.run(command, cwd=source, env={**os.environ, **environment}, check=True)
    [built] = to.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


def dependencies_of(requirements, extra=""):
    """Yield the distributions that these requirements need, recursively, with one extra of the first."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement.name
            yield from dependencies_of(distribution(requirement.name).requires or [])


def link(name, into):
    """Install a distribution by symbolic links to the project's environment."""
    found = distribution(name)
    for entry in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        if not (into / entry).exists():
            (into / entry).symlink_to(found.locate_file(entry))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Give a function that builds a package, once: the sdist, and the wheel from the unpacked sdist."""
    done = {}

    def build(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            sdist = hatchling("sdist", PACKAGES / name, folder)
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            done[name] = Built(sdist, hatchling("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder))
        return done[name]

    return build


@pytest.fixture(scope="module")
def pythons():
    """Return the supported Pythons of this machine, the oldest first. Those of pyenv need not be on the path."""
    found = []
    for minor in range(11, 20):
        candidates = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        found += [one for one in candidates if one and run(one, "-c", "import venv").returncode == 0][:1]
    return found or [sys.executable]


OLDEST_AND_NEWEST = pytest.mark.parametrize("version", [0, -1], ids=["oldest", "newest"])
"""Run a test on the first and last of ``pythons``."""


@pytest.fixture(scope="module")
def install(build, pythons, tmp_path_factory):
    """Give a function that installs a package's wheel, and what its metadata requires, into an empty environment."""
    done = {}

    def install(name, extra="", version=0):
        if (name, extra, version) not in done:
            folder = tmp_path_factory.mktemp(name) / "venv"
            subprocess.run([pythons[version], "-m", "venv", "--without-pip", folder], check=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
            subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", build(name).wheel], check=True)
            [site_packages] = folder.glob("lib/python*/site-packages")
            for dependency in set(dependencies_of(distribution(name).requires, extra)):
                link(dependency, site_packages)
            subprocess.run([*pip, "check"], check=True)
            readme = (PACKAGES / name / "README.md").read_text()
            done[name, extra, version] = Installed(
                folder / "bin" / "python", re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
            )
        return done[name, extra, version]

    return install


def run(python, *arguments, **options):
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("name", NAMES)
def test_the_wheel_built_from_the_sdist_has_every_file_of_the_source(name, build):
    source = PACKAGES / name / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    with zipfile.ZipFile(build(name).wheel) as wheel:
        assert {file for file in wheel.namelist() if ".dist-info/" not in file} == files
    assert any(file.endswith("/py.typed") for file in files)


@pytest.mark.parametrize("name", NAMES)
def test_a_build_depends_neither_on_the_folder_nor_on_the_times_of_its_files(name, build, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGES / name, copy, copy_function=shutil.copyfile)
    for number, path in enumerate(sorted(copy.rglob("*"))):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (0, 1_000_000_000 + number))
    for target, first in build(name)._asdict().items():
        again = hatchling(target, copy, tmp_path, SOURCE_DATE_EPOCH="1580601600")
        assert again.name == first.name
        assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_registry_would_show_the_description(name, build):
    done = run(sys.executable, "-m", "twine", "check", "--strict", *build(name))
    assert done.returncode == 0, done.stdout


EXTRAS = {"guardian-consumers": {"django", "prometheus", "redis"}, "guardian-store": {"zookeeper"}}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_package_has_its_licence_version_extras_and_changelog(name, build):
    with zipfile.ZipFile(build(name).wheel) as wheel:
        [licence] = [file for file in wheel.namelist() if file.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(licence) == (PACKAGES.parent / "LICENSE").read_bytes()
        [path] = [file for file in wheel.namelist() if file.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS[name]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    with tarfile.open(build(name).sdist) as archive:
        [changelog] = [member for member in archive if member.name.endswith("/CHANGELOG.md")]
        first = re.search(r"^## (\S+?)[, ]", archive.extractfile(changelog).read().decode(), re.MULTILINE)
    assert first[1] == metadata["Version"]


def test_the_project_itself_refuses_to_be_installed():
    options = ["--dry-run", "--no-index", "--no-deps"]
    done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, PACKAGES.parent)
    assert done.returncode != 0
    assert no_package.REFUSAL in done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
@OLDEST_AND_NEWEST
def test_the_public_names_are_imported_without_django_or_an_extra(name, version, install):
    module = name.replace("-", "_")
    program = (
        f"import sys, {module}\n"
        f"assert all(getattr({module}, name) for name in {module}.__all__)\n"
        "print(sorted({'django', 'kazoo', 'prometheus_client', 'redis'} & set(sys.modules)))\n"
        "import django"
    )
    done = run(install(name, version=version).python, "-I", "-c", program)
    assert done.stdout == "[]\n"
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'django'\n")


def test_the_consumers_are_imported_in_little_time(install):
    program = "import time, guardian_consumers; print(time.process_time())"
    python = install("guardian-consumers").python
    seconds = min(float(run(python, "-I", "-c", program).stdout) for _ in range(3))  # 0.1 with the interpreter's start
    assert seconds < 0.3


def test_the_guide_and_the_pages_of_the_consumers_import_only_public_names():
    package = PACKAGES / "guardian-consumers"
    texts = [PACKAGES.parent / "docs" / "consumers.md", package / "README.md", *(package / "docs").glob("*.md")]
    imports = {
        (module, name.strip())
        for text in texts
        for module, names in re.findall(
            r"^ *from (guardian_consumers[\w.]*) import (.+)$", text.read_text(), re.MULTILINE
        )
        for name in names.split(",")
    }
    assert len(imports) > 5
    assert {one for one in imports if one[1] not in import_module(one[0]).__all__} == set()


@OLDEST_AND_NEWEST
def test_the_readme_of_the_consumers_publishes_and_consumes_a_message(broker, vhost, install, tmp_path, version):
    python, [worker, order] = install("guardian-consumers", version=version)
    (tmp_path / "worker.py").write_text(worker)
    environment = {"RABBIT_URL": settings_at(broker.amqp_url, vhost).url, "RABBIT_EXCHANGE_NAME": "shop_local"}
    with subprocess.Popen(
        [python, "-m", "guardian_consumers", "worker:orders"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            # The publisher is refused until the worker has declared its queue.
            wait_until(lambda: run(python, "-c", order, env=environment).returncode == 0)
            assert process.stdout.readline() == "shipped Dune\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


DJANGO_WORKER = """
from django.contrib.auth.models import Group  # importable once Django is set up

def orders(message):
    Group.objects.create(name=message.body["book"])
    print([group.name for group in Group.objects.all()], flush=True)
"""


@pytest.mark.parametrize(
    "command", [["consume"], ["python", "-m", "guardian_consumers"], ["python", "manage.py", "consume"]]
)
def test_the_commands_consume_in_a_django_project(broker, vhost, install, tmp_path, command):
    python, [_, order] = install("guardian-consumers", "django")
    url, settings = settings_at(broker.amqp_url, vhost).url, {"RABBIT_EXCHANGE_NAME": "shop_local"}
    run(python, "-m", "django", "startproject", "shop", ".", cwd=tmp_path)
    (tmp_path / "worker.py").write_text(DJANGO_WORKER)
    with (tmp_path / "shop" / "settings.py").open("a") as file:
        file.write(f"INSTALLED_APPS += ['guardian_consumers']\nRABBIT_URL = {url!r}\nLOGGING = {{'version': 1}}\n")
    assert run(python, "manage.py", "migrate", cwd=tmp_path, env={}).returncode == 0
    with subprocess.Popen(
        [python.parent / command[0], *command[1:], "worker:orders"], cwd=tmp_path,
        env={**settings, "DJANGO_SETTINGS_MODULE": "shop.settings", "RABBIT_SPEED": "9"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: run(python, "-c", order, env={**settings, "RABBIT_URL": url}).returncode == 0)
            assert process.stdout.readline() == "['Dune']\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert "RABBIT_SPEED is not a setting" in process.stderr.read()  # the project's LOGGING disables no logger
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ([], {"DJANGO_SETTINGS_MODULE": "shop.settings"}, "install guardian-consumers[django]"),
        (["--metrics", "9100"], {}, "install guardian-consumers[prometheus]"),
        ([], {"RABBIT_RATE": "5", "RABBIT_RATE_REDIS_URL": "redis://127.0.0.1:1"}, "install guardian-consumers[redis]"),
    ],
)
def test_the_command_names_the_extra_that_an_option_needs(install, options, environment, says):
    settings = {"RABBIT_URL": "amqp://127.0.0.1:1", "RABBIT_EXCHANGE_NAME": "shop_local", **environment}
    done = run(
        install("guardian-consumers").python, "-m", "guardian_consumers", "builtins:print=orders", *options,
        env=settings,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


@OLDEST_AND_NEWEST
def test_the_programs_of_the_store_post_read_handle_and_delete_a_message(live_server, install, version):
    python, [client, asynchronous] = install("guardian-store", version=version)
    page = (PACKAGES / "guardian-store" / "docs" / "first-worker.md").read_text()
    [worker] = re.findall(r"^```python\n(# worker\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    _, key = applications.create_key(applications.create_application("shop"))
    environment = {"GUARDIAN": live_server.url, "KEY": key}
    done = run(python, "-I", "-c", client, env=environment)
    assert re.fullmatch(r"\d+\.\d{7} a book\n", done.stdout), done.stderr
    with subprocess.Popen(
        [python, "-I", "-c", worker], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "shipped a book\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert run(python, "-I", "-c", asynchronous, env=environment).stdout == "deleted a book\n"


def test_a_worker_names_the_extra_that_zookeeper_needs(install):
    program = (
        "from guardian_store import *\n"
        "Worker('c', print, HTTPTransport('http://127.0.0.1:1', 'shop', key='k'), sharing=ZooKeeper('127.0.0.1:2181'))"
    )
    done = run(install("guardian-store").python, "-I", "-c", program)
    assert done.stderr.endswith("ModuleNotFoundError: kazoo is missing: install guardian-store[zookeeper]\n")
