"""``adopt_broker``: assign owners to Pulse users of the broker from a file."""

import csv
import io
import json

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from accounts.importing import owners_file
from accounts.models import AuditEntry, Owner, PulseUser
from notifications.mails import compose
from notifications.models import Notification
from rabbit.permissions import FULL_ACCESS
from tests.conftest import Amqp
from tests.site.test_commands import run
from tests.support.toolbox import AWAY, sent, url_for, wait_until

pytestmark = pytest.mark.usefixtures("guarded")


@pytest.fixture
def write_file(tmp_path):
    def write(content, encoding="utf-8"):
        path = tmp_path / "owners.csv"
        path.write_bytes(content.encode(encoding))
        return str(path)

    return write


def run_command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    call_command("adopt_broker", *arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def refusal(*arguments):
    """Return the error of the command without its first line."""
    with pytest.raises(CommandError) as error:
        run_command(*arguments)
    assert error.value.returncode == 1
    assert not PulseUser.objects.exists()
    return str(error.value).split("\n")[1:]


def owners_by_pulse_user():
    return {row.username: sorted(owner.email for owner in row.owners.all()) for row in PulseUser.objects.all()}


# Listing


def test_pulse_users_without_an_owner_are_listed_with_queues_and_messages(
    alice, create_pulse_user, amqp, broker, guarded, management
):
    busy, idle, root, mine = (
        create_pulse_user("busy"),
        create_pulse_user("idle"),
        create_pulse_user("root", ["administrator"]),
        create_pulse_user("mine"),
    )
    PulseUser.objects.create(username=mine, ready=True)
    odd = create_pulse_user("=cmd|'/c calc'!A1")
    amqp.queue(f"queue/{busy}/a", 3)
    amqp.queue(f"queue/{busy}/b/c", 4)
    amqp.queue("queue/nobody/a", 1)
    management.set_permissions(guarded, busy, FULL_ACCESS)
    connected = Amqp(url_for(broker, busy, "secret"), guarded)
    try:
        rows = wait_for_connection(
            lambda: {row["username"]: row for row in csv.DictReader(run_command()[0].splitlines())}, busy
        )
    finally:
        connected.connection.close()
    assert rows[busy] == {
        "username": busy, "owners": "", "guess": "", "queues": "2", "messages": "7", "connections": "1",
    }  # fmt: skip
    assert (rows[idle]["queues"], rows[idle]["messages"], rows[idle]["connections"]) == ("0", "0", "0")
    assert not {root, mine, odd, management.whoami().name} & rows.keys()
    out, err = run_command()
    assert f"{root} is left out: '{root}' is an administrator of the broker" in err
    assert f"{odd} is left out: The name has the character" in err
    assert out.splitlines()[0] == "username,owners,guess,queues,messages,connections"
    asjson = json.loads(run_command("--json")[0])
    assert {pulse_user["username"] for pulse_user in asjson["accounts"]} == rows.keys()
    assert root in asjson["left_out"]


def wait_for_connection(rows, name):
    """Return the rows once the broker reports the connection, which takes some seconds."""
    return wait_until(lambda: found if (found := rows())[name]["connections"] != "0" else None)


def test_an_owner_is_guessed_from_an_unambiguous_name(alice, bob, create_pulse_user, amqp):
    for local in ("=carol", "dan", "eve", "ed"):
        Owner.objects.create_user(f"{local}@example.org", vouched=True, last_login=timezone.now())
    Owner.objects.create_user("dan@example.com", vouched=True, last_login=timezone.now())
    Owner.objects.create_user("frank@example.org", last_login=timezone.now())  # without access
    by_name, by_queue, another = (
        create_pulse_user("Alice", exactly=True),
        create_pulse_user("x"),
        create_pulse_user("y"),
    )
    formula, two, unvouched, both = (
        create_pulse_user("z"),
        create_pulse_user("dan", exactly=True),
        create_pulse_user("frank", exactly=True),
        create_pulse_user("v"),
    )
    amqp.queue(f"queue/{by_queue}/jobs/BOB")
    amqp.queue(f"queue/{formula}/=carol")
    amqp.queue(f"queue/{another}/eve")
    amqp.queue(f"queue/{both}/eve/ed")
    out, _ = run_command()
    guesses = {row["username"]: row["guess"] for row in csv.DictReader(out.splitlines())}
    assert guesses[by_name] == "alice@example.org"
    assert guesses[by_queue] == "bob@example.org"
    assert guesses[formula] == "'=carol@example.org"  # otherwise a spreadsheet reads a formula
    # Two people have the name dan, frank has no access, and eve matches two Pulse users.
    assert [guesses[name] for name in (two, unvouched, another, both)] == [""] * 4


# Adopting


@pytest.mark.slow
def test_a_file_is_first_previewed_and_then_applied(alice, bob, create_pulse_user, write_file, environment, management):
    first, second, third = create_pulse_user("a"), create_pulse_user("b"), create_pulse_user("c")
    before = management.users(), management.all_permissions()
    path = write_file(
        f"username,owners\n{first},alice@example.org BOB@example.org\n{second},bob@example.org\n{third},\n"
    )
    code, out, err = run(environment, "adopt_broker", path)
    assert (code, err, owners_by_pulse_user()) == (0, "", {})
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith(f"Pulse user adopt {first} alice@example.org, bob@example.org")
    assert lines[-3:] == [
        "2 Pulse users: adopt",
        "1 without an owner: skipped",
        "Nothing was changed. Run it with --apply to carry out these steps.",
    ]
    code, out, err = run(environment, "adopt_broker", path, "--apply")
    assert (code, err, out.splitlines()[-1]) == (0, "", "Done.")
    assert owners_by_pulse_user() == {first: ["alice@example.org", "bob@example.org"], second: ["bob@example.org"]}
    assert (management.users(), management.all_permissions()) == before
    assert AuditEntry.objects.get(event="adopted").additional_data["command"] == "adopt_broker"
    assert run_command(path, "--apply")[0].splitlines()[-1] == "There is nothing to do."


def test_each_owner_gets_one_mail_about_all_adopted_pulse_users(alice, bob, create_pulse_user, write_file):
    both, mine, other = (create_pulse_user("n") for _ in range(3))
    rows = f"{both},alice@example.org bob@example.org\n{mine},alice@example.org\n{other},\n"
    path = write_file(f"username,owners\n{rows}")
    run_command(path)
    assert not Notification.objects.exists()
    run_command(path, "--apply")
    run_command(path, "--apply")
    assert sent(alice.email) == sent(bob.email) == ["owner-assigned"]
    to_alice, to_bob = (compose(Notification.objects.get(recipient=owner.email)) for owner in (alice, bob))
    assert to_alice.subject == "[Guardian] You are now an owner of 2 Pulse users"
    assert all(name in to_alice.body for name in (both, mine))
    assert to_bob.subject == f"[Guardian] You are now an owner of {both}"
    assert mine not in to_bob.body


@pytest.mark.parametrize(
    "content",
    [
        "username,owners\r\n{0},alice@example.org bob@example.org\r\n",
        '\ufeffusername;owners\r\n{0};"alice@example.org; bob@example.org"\r\n',
        "\ufeffusername\towners\tguess\r\n{0}\talice@example.org,bob@example.org\t\r\n",
        'Guess, Owners ,USERNAME\n,"alice@example.org\n  bob@example.org",{0}\n',
        '\n"owners","username"\n\n"alice@example.org,ALICE@EXAMPLE.ORG;;bob@example.org ","{0}"\n , \n',
        "username,owners,guess,queues,messages,connections\n{0},alice@example.org bob@example.org\n",
    ],
    ids=["plain", "excel with a BOM", "tabs", "line break in a cell", "quotes", "short rows"],
)
def test_files_of_spreadsheet_programs_are_read(alice, bob, create_pulse_user, write_file, content):
    name = create_pulse_user("a")
    run_command(write_file(content.format(name)), "--apply")
    assert owners_by_pulse_user() == {name: ["alice@example.org", "bob@example.org"]}


def test_a_guess_that_looks_like_a_formula_survives_a_round_trip(create_pulse_user, amqp, write_file):
    Owner.objects.create_user("=carol@example.org", vouched=True, last_login=timezone.now())
    name = create_pulse_user("=carol"[1:], exactly=True)
    amqp.queue(f"queue/{name}/=carol")
    rows = list(csv.DictReader(run_command()[0].splitlines()))
    [row] = [row for row in rows if row["username"] == name]
    out, _ = run_command(write_file(f"username,owners\n{name},{row['guess']}\n"), "--apply", "--json")
    assert json.loads(out)["applied"] is True
    assert owners_by_pulse_user() == {name: ["=carol@example.org"]}


def test_all_errors_of_a_file_are_reported_with_their_lines(alice, create_pulse_user, write_file, management):
    own = management.whoami().name
    Owner.objects.create_user("unvouched@example.org", last_login=timezone.now())
    Owner.objects.create_user("unproven@example.org", vouched=True)
    fine, root = create_pulse_user("fine"), create_pulse_user("root", ["administrator"])
    lines = [
        "username,owners",
        f"{fine},alice@example.org",
        "not-there,alice@example.org",
        f"{fine},",
        f'{root},"alice@example.org\n"',
        f"{own},nobody@example.org not-an-address",
        "=1+1,alice@example.org",
        ",alice@example.org",
    ]
    assert refusal(write_file("\n".join(lines[:-1])), "--apply") == [
        "line 3: not-there: The broker has no such user.",
        f"line 4: {fine} is already on line 2.",
        f"line 5: {root}: '{root}' is an administrator of the broker.",
        f"line 7: {own}: '{own}' is the RabbitMQ user that Guardian itself uses.",
        "line 7: no owner with access has the address nobody@example.org; "
        "create one with: manage.py create_owner nobody@example.org --vouched",
        "line 7: 'not-an-address' is not an e-mail address.",
        "line 8: =1+1: The name has the character '=' in it; only the letters a to z and A to Z, digits, '.', '_' and "
        "'-' can be used.",
    ]
    assert refusal(write_file("\n".join(lines)), "--apply") == ["line 9: it names no Pulse user."]
    for nobody in ("unvouched@example.org", "unproven@example.org"):
        assert refusal(write_file(f"username,owners\n{fine},{nobody}\n"))[0].startswith(
            "line 2: no owner with access has"
        )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "line 1: the first line must name the columns, including username and owners."),
        ("alice,alice@example.org\n", "line 1: the first line must name the columns"),
        ("username\nalice\n", "line 1: the first line must name the columns"),
        ("username,owners\na,b@example.org,c@example.org\n", "line 2: it has 3 cells, but the first line has 2. Quote"),
        ('username,owners\na,b\n"c,d\n', "line 3: unexpected end of data."),
        ('username,owners\n"a"b,c\n', "line 2: ',' expected after '\"'."),
        ("username,owners\na," + "x" * 200_000 + "\n", "line 2: field larger than field limit"),
    ],
)
def test_a_malformed_file_is_refused(write_file, content, expected):
    assert refusal(write_file(content))[0].startswith(expected)


def test_an_unreadable_file_is_refused(write_file, tmp_path, monkeypatch):
    assert refusal(str(tmp_path / "none.csv")) == [f"{tmp_path}/none.csv: No such file or directory."]
    assert refusal(str(tmp_path)) == [f"{tmp_path}: Is a directory."]
    assert "UTF-8" in refusal(write_file("username,owners\n", encoding="utf-16"))[0]
    monkeypatch.setattr(owners_file, "MAX_FILE_BYTES", 1024 * 1024)
    assert "larger than 1 MB" in refusal(write_file("x" * (1024 * 1024 + 1)))[0]
    with pytest.raises(CommandError, match="--apply and --write need the filled file"):
        run_command("--apply")


@pytest.mark.parametrize("arguments", [[], ["FILE", "--apply"]])
def test_without_the_broker_nothing_is_adopted(alice, write_file, settings, arguments):
    path = write_file("username,owners\na,alice@example.org\n")
    settings.RABBITMQ_MANAGEMENT_URL = AWAY
    with pytest.raises(
        CommandError, match=r"Nothing was done. The request to the broker failed: .*can't connect"
    ) as error:
        run_command(*(path if argument == "FILE" else argument for argument in arguments))
    assert error.value.returncode == 1
    assert not PulseUser.objects.exists()
