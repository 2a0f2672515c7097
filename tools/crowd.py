"""Owners and their agents: they sign in, look at pages, create Pulse users, register agents and publish events."""

import contextlib
import itertools
import json
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import httpx

from tools.load import ANSWER_SECONDS, Client, Failed, LoadThread, Request
from tools.mail import MailCatcher

PAGES = ("/", "/queues/", "/pulse-users/", "/agents/", "/exchanges/", "/tokens/", "/settings/")
TYPES = ("order", "resource", "user_role")
"""The object types of events."""

MIN_TO_REMOVE = 2
"""An owner with fewer Pulse users or agents removes none, so that some are left to check at the end."""

CONCURRENT_USE_STATUSES = (200, 202, 204, 404, 409)
"""The expected answers for a queue in concurrent use."""

SIGN_INS_A_MINUTE = 8
"""All requests come from one address, which may request 20 codes a minute and 200 an hour."""

_CODE = re.compile(r"^\s*([B-Z]{4}-[B-Z]{4})\s*$", re.MULTILINE)
_CSRF_TOKEN = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')


class Registered(NamedTuple):
    """A queue that Guardian registered."""

    vhost: str
    queue: str


class Event(NamedTuple):
    """A published event. ``began`` is a monotonic time."""

    number: int
    offering: str
    object_type: str
    began: float
    delivered: int
    everywhere: bool
    """Whether no queue was skipped, full or missing."""


@dataclass
class Agent:
    """A registered agent with its queue and types of events. ``ready``: the monotonic time of the answer."""

    identity: str
    queue: Registered
    offering: str
    types: list[str]
    ready: float


@dataclass
class Outcome:
    """What must be true at the end according to Guardian's answers, without unknown outcomes."""

    pulse_users: dict[str, set[str]] = field(default_factory=dict)
    """The e-mail addresses of the owners, by the Pulse user's name."""
    removed_pulse_users: set[str] = field(default_factory=set)
    agents: dict[Registered, Agent] = field(default_factory=dict)
    answered: Counter[Registered] = field(default_factory=Counter)
    removed_queues: set[Registered] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class Person:
    """An owner with a token, a session, Pulse users and agents, who does one thing at a time."""

    def __init__(self, email: str, token: str, session: str, offering: str, addresses: Mapping[str, str]) -> None:
        """Create an owner without Pulse users and agents. ``session`` is the cookie's value."""
        self.email = email
        self.offering = offering
        self.lock = threading.Lock()
        self.pulse_users: list[str] = []
        self.agents: list[Agent] = []
        self.requests: list[Request] = []
        self._addresses = dict(addresses)
        self._token = {"Authorization": f"Token {token}"}
        self.session = session

    def client(self, chance: random.Random, *, by_session: bool = False) -> Client:
        """Return a client of a random web process that sends the token or the session."""
        name = chance.choice(list(self._addresses))
        csrf = "c" * 32
        by_cookie = {"Cookie": f"sessionid={self.session}; csrftoken={csrf}", "X-CSRFToken": csrf}
        headers = by_cookie if by_session else self._token
        return Client(name, self._addresses[name], headers, self.requests)

    def browser(self, chance: random.Random) -> tuple[str, httpx.Client]:
        """Return the name of a random web process, and a client for it without cookies."""
        name = chance.choice(list(self._addresses))
        return name, httpx.Client(base_url=self._addresses[name], trust_env=False, timeout=ANSWER_SECONDS)


class Action(NamedTuple):
    """An action and its weight. With ``to``, only owners with at least ``least`` of these can do it."""

    weight: int
    do: Callable[[Person, random.Random], None]
    to: Literal["", "pulse_users", "agents"] = ""
    least: int = 1


class Crowd:
    """All owners, their actions, and the outcome."""

    def __init__(self, people: Sequence[Person], mail: MailCatcher) -> None:
        self.people = people
        self.outcome = Outcome()
        self._mail = mail
        self._numbers = itertools.count(1)
        self._next_sign_in = time.monotonic()
        self._lock = threading.Lock()
        self._upcoming: list[Action] = []
        self._actions = [
            Action(8, self._view_pages),
            Action(1, self._sign_in),
            Action(3, self._create_pulse_user),
            Action(1, self._remove_pulse_user, "pulse_users", MIN_TO_REMOVE),
            Action(1, self._change_password, "pulse_users"),
            Action(1, self._purge_queue, "pulse_users"),
            Action(1, self._delete_queue, "pulse_users"),
            Action(5, self._register),
            Action(2, self._remove_agent, "agents", MIN_TO_REMOVE),
            Action(6, self._publish),
            Action(1, self._change_token),
        ]

    def act(self, chance: random.Random) -> None:
        """Let one owner do one action. Raises Failed for an unexpected answer."""
        with self._lock:
            if not self._upcoming:
                self._upcoming = [action for action in self._actions for _ in range(action.weight)]
                chance.shuffle(self._upcoming)
            action = self._upcoming.pop()
            able = [
                one
                for one in self.people
                if not one.lock.locked() and (not action.to or len(getattr(one, action.to)) >= action.least)
            ]
            if not able:
                return
            person = chance.choice(able)
            person.lock.acquire()
        try:
            action.do(person, chance)
        finally:
            person.lock.release()

    def name_of_queue(self, number: int, chance: random.Random) -> str:
        """Return a name for a new queue: mostly of a Pulse user, sometimes unowned or unpatterned."""
        pulse_users = sorted(self.outcome.pulse_users)
        if not pulse_users or chance.random() < 0.1:
            return chance.choice((f"queue/nobody/{number}", f"loose-{number}"))
        return f"queue/{chance.choice(pulse_users)}/{number}"

    # Actions

    def _view_pages(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance, by_session=True)
        content = client.ask("GET", "/api/queues/?page_size=5", what="look at pages")
        pages = [*PAGES, *(f"/queues/{uuid.UUID(one['uuid'])}/" for one in json.loads(content))]
        client.ask("GET", chance.choice(pages), what="look at pages")

    def _sign_in(self, person: Person, chance: random.Random) -> None:
        with self._lock:
            if time.monotonic() < self._next_sign_in:
                return
            self._next_sign_in = time.monotonic() + 60 / SIGN_INS_A_MINUTE
        name, browser = person.browser(chance)
        with browser:
            before = len(self._mail.to(person.email))
            page = self._record(person, name, lambda: browser.get("/signin/"), 200)
            form = {"csrfmiddlewaretoken": _csrf_token(page), "email": person.email}
            page = self._record(person, name, lambda: browser.post("/signin/", data=form, follow_redirects=True), 200)
            codes = [code[1] for mail in self._mail.to(person.email)[before:] if (code := _CODE.search(mail.text))]
            form = {"csrfmiddlewaretoken": _csrf_token(page), "code": codes[-1] if codes else ""}
            self._record(person, name, lambda: browser.post("/signin/code/", data=form), 302)
            person.session = browser.cookies.get("sessionid") or person.session

    def _record(self, person: Person, name: str, ask: Callable[[], httpx.Response], expected: int) -> httpx.Response:
        began = time.monotonic()
        answer, status, problem = None, 0, ""
        try:
            answer = ask()
            status = answer.status_code
            if status != expected:
                problem = f"{answer.request.method} {answer.url.path}: {status} {answer.text[:200]!r}"
        except httpx.HTTPError as error:
            problem = f"signing in: {error!r}"
        person.requests.append(Request(name, began, time.monotonic(), problem, "sign in", status))
        if answer is None or problem:
            raise Failed(problem)
        return answer

    def _create_pulse_user(self, person: Person, chance: random.Random) -> None:
        name = f"user-{next(self._numbers)}"
        owners = {person.email, chance.choice(self.people).email}
        body = {"username": name, "owners": sorted(owners)}
        person.client(chance).ask("POST", "/api/pulse-users/", body, what="create Pulse users")
        person.pulse_users.append(name)
        self.outcome.pulse_users[name] = {person.email}  # the other one is invited, and nobody accepts

    def _remove_pulse_user(self, person: Person, chance: random.Random) -> None:
        name = person.pulse_users.pop(chance.randrange(len(person.pulse_users)))
        del self.outcome.pulse_users[name]
        client, path = person.client(chance), f"/api/pulse-users/{name}/"
        body: dict[str, str] = {}
        while answer := client.ask("DELETE", path, body, what="remove Pulse users", expected=(202, 204, 409)):
            body = {"confirm": json.loads(answer)["confirm"]}
        self.outcome.removed_pulse_users.add(name)

    def _change_password(self, person: Person, chance: random.Random) -> None:
        path = f"/api/pulse-users/{chance.choice(person.pulse_users)}/rotate-password/"
        person.client(chance).ask("POST", path, what="change passwords")

    def _purge_queue(self, person: Person, chance: random.Random) -> None:
        if path := self._path_of_queue(person, chance):
            person.client(chance).ask("POST", f"{path}purge/", what="purge queues", expected=CONCURRENT_USE_STATUSES)

    def _delete_queue(self, person: Person, chance: random.Random) -> None:
        if path := self._path_of_queue(person, chance):
            person.client(chance).ask("DELETE", path, what="delete queues", expected=CONCURRENT_USE_STATUSES)

    def _path_of_queue(self, person: Person, chance: random.Random) -> str:
        content = person.client(chance).ask("GET", "/api/queues/?search=queue/", what="list queues")
        queues = json.loads(content)
        return f"/api/queues/{chance.choice(queues)['uuid']}/" if queues else ""

    def _register(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance)
        wanted = {"offering": person.offering, "name": f"agent{next(self._numbers)}"}
        content = client.ask("POST", "/api/agent-identities/", wanted, what="register agents")
        path = f"/api/agent-identities/{(identity := json.loads(content)['uuid'])}"
        types = chance.sample(TYPES, chance.choice((1, 2)))
        if len(types) == 1:
            body = {"offering_uuid": person.offering, "object_type": types[0]}
            content = client.ask("POST", f"{path}/create_queue/", body, what="subscribe")
        else:
            content = client.ask("POST", f"{path}/register_queue/", {"object_types": types}, what="subscribe")
        answer = json.loads(content)
        queue = Registered(answer["vhost"], answer["queue_name"])
        self.outcome.answered[queue] += 1
        agent = Agent(identity, queue, person.offering, types, time.monotonic())
        person.agents.append(agent)
        self.outcome.agents[queue] = agent

    def _remove_agent(self, person: Person, chance: random.Random) -> None:
        agent = person.agents.pop(chance.randrange(len(person.agents)))
        del self.outcome.agents[agent.queue]
        person.client(chance).ask("DELETE", f"/api/agent-identities/{agent.identity}/", what="remove agents")
        self.outcome.removed_queues.add(agent.queue)

    def _publish(self, person: Person, chance: random.Random) -> None:
        number, object_type = next(self._numbers), chance.choice(TYPES)
        body = {"object_type": object_type, "payload": {"number": number}}
        path = f"/api/offerings/{person.offering}/events/"
        began = time.monotonic()
        content = person.client(chance).ask("POST", path, body, what="publish events")
        answer = json.loads(content)
        everywhere = not answer["skipped"] and not answer["rejected"] and not answer["gone"]
        event = Event(number, person.offering, object_type, began, answer["delivered"], everywhere)
        self.outcome.events.append(event)

    def _change_token(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance, by_session=True)
        body = {"name": f"token{next(self._numbers)}", "days": 30}
        content = client.ask("POST", "/api/tokens/", body, what="create tokens")
        client.ask("DELETE", f"/api/tokens/{json.loads(content)['uuid']}/", what="revoke tokens")


def _csrf_token(page: httpx.Response) -> str:
    found = _CSRF_TOKEN.search(page.text)
    return found[1] if found else ""


class Actor(LoadThread):
    """A thread in which the owners of a crowd act in turn."""

    def __init__(self, name: str, crowd: Crowd, pause: float, chance: random.Random) -> None:
        """Create an actor. ``pause``: average seconds between two actions."""
        super().__init__(name)
        self._crowd = crowd
        self._pause = pause
        self._chance = chance

    def work(self) -> None:
        """Act until ``ended`` is set. Failed requests are recorded, and checked at the end."""
        while not self.ended.wait(self._chance.uniform(0, 2) * self._pause):
            with contextlib.suppress(Failed):
                self._crowd.act(self._chance)
