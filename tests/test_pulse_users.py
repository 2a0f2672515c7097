"""RabbitMQ accounts: made and removed on the broker and here together, or not at all."""

import uuid

import pika
import pytest

from accounts.models import Owner, PulseUser
from accounts.pulse_users import NameTaken, make_pulse_user, remove_pulse_user
from rabbit.management import BrokerError, Management, NotThere
from rabbit.names import BadName
from tests.conftest import Amqp


@pytest.fixture
def alice(guarded):
    return Owner.objects.create_user("alice@example.org", vouched=True)


@pytest.fixture
def name(management):
    """Give a name that no account has, and remove its account afterwards."""
    name = f"alice-{uuid.uuid4().hex[:8]}"
    yield name
    if name in {user.name for user in management.users()}:
        management.delete_user(name)


def as_user(broker, vhost, name, password):
    return Amqp(f"amqp://{name}:{password}@{broker.amqp_url.rpartition('@')[2]}", vhost)


def test_a_made_account_can_use_its_own_names_and_no_others(alice, name, broker, guarded):
    pulse_user, password = make_pulse_user(name, [alice])
    assert (pulse_user.ready, list(pulse_user.owners.all())) == (True, [alice])
    mine = as_user(broker, guarded, name, password)
    mine.queue(f"queue/{name}/builds")
    mine.channel.exchange_declare(f"exchange/{name}/events", "topic")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"):
        mine.channel.queue_declare("queue/somebody/builds")


def test_the_password_is_nowhere_in_the_database(alice, name):
    from django.core.management import call_command

    _, password = make_pulse_user(name, [alice])
    from io import StringIO

    dump = StringIO()
    call_command("dumpdata", stdout=dump)
    assert name in dump.getvalue()
    assert password not in dump.getvalue()


@pytest.mark.parametrize("bad", ["", "1alice", "al ice", "alice\n", "a" * 101, "älice", "alice/builds"])
def test_a_bad_name_is_refused_and_nothing_is_made(alice, bad):
    with pytest.raises(BadName):
        make_pulse_user(bad, [alice])
    assert not PulseUser.objects.exists()


def test_a_name_that_is_on_the_broker_already_is_refused_and_its_account_untouched(alice, name, management):
    management.put_user(name, "theirs", ["monitoring"])
    with pytest.raises(NameTaken):
        make_pulse_user(name, [alice])
    assert management.user(name).tags == {"monitoring"}
    assert not PulseUser.objects.exists()


def test_a_name_that_is_taken_here_is_refused(alice, name):
    PulseUser.objects.create(username=name, ready=True)
    with pytest.raises(NameTaken):
        make_pulse_user(name, [alice])


def test_with_the_broker_away_nothing_is_made(alice, name, settings):
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    with pytest.raises(BrokerError):
        make_pulse_user(name, [alice])
    assert not PulseUser.objects.exists()


def test_where_the_broker_refuses_the_permissions_nothing_is_left_on_either_side(alice, name, settings, management):
    settings.GUARDIAN_PULSE_VHOST = "no-such-vhost"
    with pytest.raises(BrokerError):
        make_pulse_user(name, [alice])
    assert not PulseUser.objects.exists()
    with pytest.raises(NotThere):
        management.user(name)


@pytest.mark.parametrize("step", ["put_user", "set_permissions"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_making_that_dies_half_way_is_finished_by_doing_it_again(
    alice, name, monkeypatch, broker, guarded, step, done
):
    real = getattr(Management, step)

    class Killed(BaseException):
        """As sudden as SIGKILL, for this process."""

    def die(self, *arguments, **options):
        if done:
            real(self, *arguments, **options)
        raise Killed

    monkeypatch.setattr(Management, step, die)
    with pytest.raises(Killed):
        make_pulse_user(name, [alice])
    monkeypatch.setattr(Management, step, real)
    assert not PulseUser.objects.get().ready
    _, password = make_pulse_user(name, [alice])
    assert PulseUser.objects.get().ready
    as_user(broker, guarded, name, password).queue(f"queue/{name}/builds")


def test_a_removed_account_is_gone_with_its_queues_and_exchanges_and_nobody_elses(
    alice, name, broker, guarded, management
):
    pulse_user, password = make_pulse_user(name, [alice])
    mine = as_user(broker, guarded, name, password)
    mine.queue(f"queue/{name}/builds")
    mine.channel.exchange_declare(f"exchange/{name}/events", "topic")
    management.make_queue(guarded, f"queue/{name}2/builds")
    remove_pulse_user(pulse_user)
    assert [row["name"] for row in management.list_queues(guarded, {"columns": "name"})] == [f"queue/{name}2/builds"]
    assert f"exchange/{name}/events" not in {exchange.name for exchange in management.exchanges(guarded)}
    assert not PulseUser.objects.exists()
    with pytest.raises(NotThere):
        management.user(name)


def test_with_the_broker_away_a_removal_removes_nothing(alice, name, settings, broker):
    pulse_user, _ = make_pulse_user(name, [alice])
    settings.RABBITMQ_MANAGEMENT_URL = "http://guest:guest@127.0.0.1:1"
    with pytest.raises(BrokerError):
        remove_pulse_user(pulse_user)
    assert PulseUser.objects.exists()
