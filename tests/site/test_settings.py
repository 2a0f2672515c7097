"""Settings are taken literally from the environment and from .env, or refused with a reason."""

import itertools
import json
import os
import runpy
import shutil
from pathlib import Path

import httpx
import pytest

from guardian_site import env_file, environment
from guardian_site.environment import Unreadable, database, mail_server, read
from tests.support.served import run_python
from tools.pages import declared_settings

PROJECT = Path(__file__).resolve().parents[2]

DECLARED = {setting.name: setting for setting in declared_settings()}
TEXTS = sorted(name for name, setting in DECLARED.items() if setting.kind == "str")
LISTS = sorted(name for name, setting in DECLARED.items() if setting.kind == "items")
URLS = sorted(name for name, setting in DECLARED.items() if setting.kind == "url")
OTHERS = sorted(DECLARED.keys() - {*TEXTS, *LISTS, *URLS, "GUARDIAN_VAR_DIR"})
PRINT_SETTINGS = """
import json
from guardian_site import settings
print(json.dumps({name: str(value) for name, value in vars(settings).items() if name.isupper()}))
print(json.dumps(settings.UNREADABLE))
"""


def loaded(variables, folder=PROJECT):
    """Return the settings of a new process with these environment variables, and those that it could not read."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}:{PROJECT}", **variables}
    answer = run_python(environment, "-c", PRINT_SETTINGS, folder=folder)
    return tuple(map(json.loads, answer.stdout.splitlines()))


@pytest.fixture
def installation(tmp_path):
    """Return a function that loads the settings of an installation with this .env."""
    shutil.copytree(PROJECT / "guardian_site", tmp_path / "guardian_site", ignore=shutil.ignore_patterns("__pycache__"))

    def load(text):
        (tmp_path / ".env").write_text(text)
        return loaded({}, tmp_path)

    return load


VALUES = ["$abc", "$", "pa$$word", "'abc'", '"abc"', "abc # def", "#abc", "a b", "a\\b", "a=b", "it's"]


def given_in_turn(names, values):
    """Return a value for each of these settings; loading them takes a second, so each setting gets one."""
    return dict(zip(names, itertools.cycle(values), strict=False))


@pytest.mark.slow
def test_every_text_in_the_environment_is_taken_literally(tmp_path):
    given = given_in_turn(TEXTS, VALUES)
    settings, unreadable = loaded({"GUARDIAN_VAR_DIR": str(tmp_path), **given})
    assert ({name: settings[name] for name in TEXTS}, unreadable) == (given, {})


@pytest.mark.slow
def test_every_text_in_the_env_file_is_the_same_as_in_the_environment(installation):
    def written(value):
        quoted = f"'{value}'" if "'" not in value else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return quoted if value.startswith(("'", '"')) else value

    given = given_in_turn(TEXTS, VALUES)
    settings, unreadable = installation("\n".join(f"{name}={written(value)}" for name, value in given.items()))
    assert ({name: settings[name] for name in TEXTS}, unreadable) == (given, {})


@pytest.mark.slow
def test_every_entry_of_a_list_is_taken_literally(tmp_path):
    value = "$a, 'b',\"c\" ,#d,e # f,g\\h"
    settings, unreadable = loaded({"GUARDIAN_VAR_DIR": str(tmp_path), **dict.fromkeys(LISTS, value)})
    expected = str(["$a", "'b'", '"c"', "#d", "e # f", "g\\h"])
    assert {name: settings[name] for name in LISTS} == dict.fromkeys(LISTS, expected)
    assert unreadable == {}


@pytest.mark.slow
def test_every_setting_that_is_no_text_refuses_what_it_cannot_take_literally(tmp_path):
    given = given_in_turn([*OTHERS, *URLS], ["$5", "'5'", '"5"', "5 # five", "#5", "5 5"])
    settings, unreadable = loaded({"GUARDIAN_VAR_DIR": str(tmp_path), **given})
    assert sorted(unreadable) == OTHERS
    assert {name: settings[name] for name in URLS} == {name: given[name] for name in URLS}  # a check refuses them


@pytest.mark.slow
def test_no_setting_may_begin_or_end_with_a_blank(tmp_path):
    values = {name: f"{setting.default or 'x'} " for name, setting in DECLARED.items()}
    _, unreadable = loaded(values | {"GUARDIAN_VAR_DIR": f"{tmp_path}\n"})
    assert unreadable == dict.fromkeys(DECLARED, "it begins or ends with a blank or a line break")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("X=a", "a"),
        ("export X=a", "a"),
        ("X=", ""),
        ("X=''", ""),
        ("X=a'b", "a'b"),
        ('X=a"b"', 'a"b"'),
        ("X='a\\b'", "a\\b"),
        ("X=a\\b", "a\\b"),
        (r'X="a\"b\\c\$d\e"', r'a"b\c$d\e'),
        ("X='\"a\"'", '"a"'),
        ("X=a # b", "a # b"),
        ("X=a\r", "a"),
        ("\ufeffX=a", "a"),
        ("X=a\u2028b", "a\u2028b"),
    ],
)
def test_a_line_of_the_env_file_sets_a_variable(tmp_path, line, value):
    (tmp_path / ".env").write_text(f"{line}\n\n   \n  # a comment\n", newline="")
    assert env_file.parse(tmp_path / ".env") == ({"X": value}, {})


@pytest.mark.parametrize(
    "line",
    [
        "X = s3cret",
        " X=s3cret",
        "X",
        "s3cret",
        "2X=s3cret",
        "X='s3cret",
        'X="s3cret" # mine',
        'X="s3cret","b"',
        "X='",
        "X=s3cret\0",
    ],
)
def test_any_other_line_of_the_env_file_is_refused_without_its_content(tmp_path, line):
    (tmp_path / ".env").write_text(f"A=b\n{line}\n")
    variables, errors = env_file.parse(tmp_path / ".env")
    assert (variables, list(errors)) == ({"A": "b"}, ["Line 2 of .env"])
    assert "s3cret" not in str(errors)


def test_an_env_file_that_cannot_be_read_is_refused(tmp_path):
    assert env_file.parse(tmp_path / "none") == ({}, {})
    (tmp_path / ".env").mkdir()
    assert env_file.parse(tmp_path / ".env") == ({}, {".env": "Is a directory"})
    (tmp_path / "latin").write_bytes(b"X=\xe9\n")
    assert env_file.parse(tmp_path / "latin") == ({}, {"latin": "it is not UTF-8"})


@pytest.mark.slow
def test_the_check_names_the_line_of_the_env_file(installation):
    _, unreadable = installation("SECRET_KEY = s3cret\n")
    assert unreadable == {"Line 1 of .env": "write NAME=value, without blanks around the ="}


def test_gunicorns_own_log_has_the_format_of_the_env_file(tmp_path, monkeypatch):
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guardian_site").symlink_to(PROJECT / "guardian_site")
    configuration = str(PROJECT / "gunicorn.conf.py")
    assert "logconfig_dict" not in runpy.run_path(configuration)
    (tmp_path / ".env").write_text("LOG_FORMAT=json\n")
    assert "logconfig_dict" in runpy.run_path(configuration)
    monkeypatch.setenv("LOG_FORMAT", "line")
    assert "logconfig_dict" not in runpy.run_path(configuration)


def test_gunicorn_keeps_idle_connections_longer_than_clients():
    configured = runpy.run_path(str(PROJECT / "gunicorn.conf.py"))["keepalive"]
    assert configured > httpx.Limits().keepalive_expiry


# Words and numbers


@pytest.fixture
def given(monkeypatch):
    """Return a function that reads a setting with this value. ``environment.unreadable`` is empty before."""
    monkeypatch.setattr(environment, "unreadable", {})
    monkeypatch.setattr(environment, "declared", {})

    def given(parse, text, default=""):
        monkeypatch.setenv("GUARDIAN_TRIED", text)
        return read("GUARDIAN_TRIED", parse, default)

    return given


@pytest.mark.parametrize(("text", "value"), [("TRUE", True), ("1", True), ("off", False), ("No", False)])
def test_words_for_true_and_false_are_read(given, text, value):
    assert given(environment.flag, text) is value


@pytest.mark.parametrize("text", ["ture", "'true'", '"true"', "$true", "true # yes", "2", "-"])
def test_other_words_are_refused(given, text):
    assert given(environment.flag, text, default="false") is False
    assert environment.unreadable == {"GUARDIAN_TRIED": "write true or false"}


@pytest.mark.parametrize("text", ["5 s", "$5", "'5'", "1e3s", "1,5", "nan", "inf"])
def test_text_that_is_no_number_is_refused(given, text):
    assert given(environment.number, text, default="7") == 7
    assert environment.unreadable == {"GUARDIAN_TRIED": "write a number"}


@pytest.mark.parametrize(("parse", "value"), [(str, "5"), (int, 5), (environment.items, ["5"])])
def test_an_empty_setting_counts_as_not_set(given, parse, value):
    assert given(parse, "", default="5") == value
    assert environment.unreadable == {}


# Addresses


@pytest.mark.parametrize(
    ("text", "security", "port"),
    [
        ("smtp://mail.example.org", "", None),
        ("smtp://mail.example.org:25", "", 25),
        ("smtp+tls://mail.example.org:587", "TLS", 587),
        ("smtps://mail.example.org:465", "SSL", 465),
        ("smtps://mail.example.org", "SSL", None),
        ("SMTPS://mail.example.org:4465", "SSL", 4465),
        ("smtp+ssl://mail.example.org:465", "SSL", 465),
    ],
)
def test_the_scheme_of_a_mail_server_says_how_it_encrypts(text, security, port):
    found = mail_server(text)
    assert found["EMAIL_BACKEND"] == "django.core.mail.backends.smtp.EmailBackend"
    assert (found["EMAIL_HOST"], found["EMAIL_PORT"]) == ("mail.example.org", port)
    assert [kind for kind in ("TLS", "SSL") if found.get(f"EMAIL_USE_{kind}")] == ([security] if security else [])


@pytest.mark.parametrize(
    "text",
    [
        "smtps://mail.example.org:587", "smtps://mail.example.org:25", "smtp+ssl://mail.example.org:587",
        "smtp+tls://mail.example.org:465", "smtp://mail.example.org:465", "smtp://mail.example.org/path",
        "smtp://mail.example.org?timeout=5", "smtp://mail.example.org:25?email_use_tls=false", "smtp://u:#p@mail",
        "smtp://u:?p@mail", "smtp://u:/p@mail", "smtp://", "smtp:///path",
    ],
)  # fmt: skip
def test_a_mail_server_that_would_be_half_understood_is_refused(text):
    with pytest.raises(Unreadable):
        mail_server(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://u:$p@db:5432/guardian", {"PASSWORD": "$p", "HOST": "db", "PORT": 5432, "NAME": "guardian"}),
        ("postgres://u:%23%40%2F%3F%25@db/guardian", {"PASSWORD": "#@/?%", "HOST": "db"}),
        ("postgresql://db/guardian?sslmode=require", {"OPTIONS": {"sslmode": "require"}}),
        ("sqlite:////srv/guardian.sqlite3", {"NAME": "/srv/guardian.sqlite3"}),
        ("sqlite:///$HOME/x.sqlite3", {"NAME": "$HOME/x.sqlite3"}),
        ("sqlite:////srv/a+b%20c.sqlite3", {"NAME": "/srv/a+b c.sqlite3"}),
        ("postgres://u+v:p+w@db/a+b", {"USER": "u+v", "PASSWORD": "p+w", "NAME": "a+b"}),
        ("sqlite://:memory:", {"NAME": ":memory:"}),
    ],
)
def test_an_address_of_a_database_is_read(text, expected):
    found = database(text)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "$DATABASE_URL", "mysql://u:p@db/guardian", "sqlite://guardian.sqlite3", "sqlite:///gua#rdian.sqlite3",
        "postgres://u:p#x@db/guardian", "postgres://u:1/x@db/guardian", "postgres://u:1?x@db/guardian",
        "postgres://db/guardian#main", "'postgres://db/guardian'",
    ],
)  # fmt: skip
def test_an_address_of_a_database_that_would_be_half_understood_is_refused(text):
    with pytest.raises(Unreadable):
        database(text)
