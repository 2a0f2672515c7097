"""Set the documented defaults before Django's settings load, so that tests ignore this machine's .env."""

import atexit
import gc
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VAR = tempfile.TemporaryDirectory(prefix="guardian-tests-")


# Collection creates millions of objects that live to the end: searching them for garbage takes 8 s in each process.
gc.disable()


def pytest_collection_finish() -> None:
    """Enable the garbage collector, which then skips what exists already."""
    gc.freeze()
    gc.enable()


# Otherwise the first import of a model imports all 3,250, which takes 4 s in each process.
_models = importlib.util.find_spec("waldur_api_client.models")
assert _models is not None
sys.modules[_models.name] = importlib.util.module_from_spec(_models)


def _documented_defaults() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(match.groups() for line in lines if (match := re.fullmatch(r"# ([A-Z_]+)=(.+)", line)))


os.environ.update(_documented_defaults())
for name in ("RABBITMQ_MANAGEMENT_URL", "RABBIT_URL", "GUARDIAN_VHOSTS", "ALLOWED_HOSTS", "GUARDIAN_OPERATOR_EMAILS"):
    os.environ[name] = ""
os.environ["ALLOWED_HOSTS"] = "testserver,127.0.0.1,localhost"
os.environ["GUARDIAN_DELETERS"] = "1"  # in the thread of the test
os.environ["SECRET_KEY"] = "for-the-tests-alone"
os.environ["GUARDIAN_VAR_DIR"] = VAR.name

if os.environ.get("GUARDIAN_TEST_DATABASE") == "sqlite":
    os.environ["DATABASE_URL"] = f"sqlite:///{VAR.name}/guardian.sqlite3"
else:
    from tools.postgresql import PrivateCluster

    cluster = PrivateCluster()
    atexit.register(cluster.stop)
    # Each worker of pytest-xdist has a server of its own, which tests may stop. The controller needs none.
    if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv or " -n 0" in " ".join(sys.argv):
        cluster.start()
    os.environ["DATABASE_URL"] = cluster.database_url()
