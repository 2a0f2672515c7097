"""`make compose-secrets`, in a folder without Docker. test_containers.py uses what it creates."""

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "compose-secrets"


def create_secrets(folder):
    """Run `make compose-secrets` in a folder, and return what it prints and the files."""
    (folder / "tools").mkdir(exist_ok=True)
    script = shutil.copy(SCRIPT, folder / "tools")
    printed = subprocess.run([script], cwd="/", capture_output=True, text=True, check=True).stdout
    files = {path.name: path for path in (folder / ".env", *sorted((folder / "secrets").iterdir()))}
    return printed, {name: path.read_text() for name, path in files.items()}


def test_the_secrets_of_compose_are_created_once_with_their_modes(tmp_path):
    printed, files = create_secrets(tmp_path)
    assert printed.startswith("Fill in GUARDIAN_BASE_URL in .env\n")
    password = files["postgres-password"].strip()
    assert len(password) == 64
    assert f"DATABASE_URL=postgres://guardian:{password}@postgres:5432/guardian\n" in files["guardian.env"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()}
    assert modes == dict.fromkeys(("guardian.env", "postgres-password", "rabbitmq.conf"), 0o644)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    (tmp_path / "secrets" / "guardian.env").chmod(0o600)
    assert create_secrets(tmp_path) == (printed, files)
    assert (tmp_path / "secrets" / "guardian.env").stat().st_mode & 0o777 == 0o644


def test_secrets_that_exist_are_kept_and_used(tmp_path):
    (tmp_path / "secrets").mkdir()
    settings = "SECRET_KEY=mine\nDATABASE_URL=postgres://guardian:word@postgres:5432/guardian"
    (tmp_path / "secrets" / "guardian.env").write_text(settings)
    (tmp_path / "secrets" / "rabbitmq.conf").write_text("default_pass = a/b")
    printed, files = create_secrets(tmp_path)
    assert files["guardian.env"].startswith(f"{settings}\n")
    assert files["postgres-password"] == "word\n"
    assert files["rabbitmq.conf"] == "default_pass = a/b\ndefault_user = guardian\n"
    assert "Fill in RABBIT_URL in secrets/guardian.env" in printed  # a/b must be encoded there


def test_a_setting_that_is_exported_is_kept_and_not_added_again(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "guardian.env").write_text("export SECRET_KEY=mine\nexport EMAIL_URL=\n")
    printed, files = create_secrets(tmp_path)
    assert files["guardian.env"].count("SECRET_KEY=") == 1
    assert "Fill in EMAIL_URL in secrets/guardian.env" in printed


def test_the_password_of_a_quoted_database_url_is_used(tmp_path):
    (tmp_path / "secrets").mkdir()
    url = "'postgres://guardian:word@postgres:5432/guardian'"
    (tmp_path / "secrets" / "guardian.env").write_text(f"DATABASE_URL={url}\n")
    assert create_secrets(tmp_path)[1]["postgres-password"] == "word\n"


def test_the_addresses_of_the_broker_name_its_user(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "rabbitmq.conf").write_text("default_user = ops\ndefault_pass = word\n")
    settings = create_secrets(tmp_path)[1]["guardian.env"]
    assert "RABBITMQ_MANAGEMENT_URL=http://ops:word@rabbitmq:15672\n" in settings
    assert "RABBIT_URL=amqp://ops:word@rabbitmq:5672\n" in settings
