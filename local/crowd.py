"""Many owners with their agents, as they use Guardian: they sign in, look, make accounts, register and publish."""

import itertools
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import httpx

from local.load import ANSWER_SECONDS, Busy, Client, Failed, Registered, Request
from local.mail import MailCatcher

PAGES = ("/", "/queues/", "/pulse-users/", "/subscriptions/", "/exchanges/", "/tokens/", "/settings/")
TYPES = ("order", "resource", "user_role")
"""The object types that agents want to hear of here."""

LEAVING_ONE = 2
"""Only who has so many loses one, so that there are some in the end, to look at."""

MAY_BE_GONE = (200, 202, 204, 404, 409)
"""The answers to what is done to a queue that others handle too."""

SIGN_INS_A_MINUTE = 8
"""All come from one address, which gets 20 codes a minute and 200 an hour."""

_CODE = re.compile(r"^\s*([B-Z]{4}-[B-Z]{4})\s*$", re.MULTILINE)
_CSRF_TOKEN = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')


class Event(NamedTuple):
    """An event that was answered as delivered to so many queues. The times are of the monotonic clock."""

    number: int
    offering: str
    object_type: str
    began: float
    delivered: int
    everywhere: bool
    """Whether no queue was skipped, was full or was not there."""


@dataclass
class Agent:
    """An agent that has registered: for which events, when that was answered (monotonic clock), and its queue."""

    identity: str
    queue: Registered
    offering: str
    types: list[str]
    ready: float


@dataclass
class Outcome:
    """What was answered to all of them, which has to be true in the end. Left out is what had no clear answer."""

    accounts: set[str] = field(default_factory=set)
    removed_accounts: set[str] = field(default_factory=set)
    agents: dict[Registered, Agent] = field(default_factory=dict)
    removed_queues: set[Registered] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


class Person:
    """An owner: an address, a token, a session, and what they have here. One thing is done at a time."""

    def __init__(self, email: str, token: str, session: str, offering: str, addresses: Mapping[str, str]) -> None:
        """Begin with nothing. ``session`` is the cookie's value; ``addresses`` are the web processes'."""
        self.email = email
        self.offering = offering
        self.lock = threading.Lock()
        self.accounts: list[str] = []
        self.agents: list[Agent] = []
        self.requests: list[Request] = []
        self._addresses = dict(addresses)
        self._token = {"Authorization": f"Token {token}"}
        self.session = session

    def client(self, chance: random.Random, *, by_session: bool = False) -> Client:
        """Give a client of one of the web processes, by the token or as a browser that is signed in."""
        name = chance.choice(list(self._addresses))
        headers = {"Cookie": f"sessionid={self.session}"} if by_session else self._token
        client = Client(name, self._addresses[name], headers)
        client.requests = self.requests
        return client

    def browser(self, chance: random.Random) -> tuple[str, httpx.Client]:
        """Give a browser without cookies before one of the web processes, and that one's name."""
        name = chance.choice(list(self._addresses))
        return name, httpx.Client(base_url=self._addresses[name], trust_env=False, timeout=ANSWER_SECONDS)


class Deed(NamedTuple):
    """What somebody does, and so often before all of it is done again. ``to``: only who has ``least`` of these can."""

    times: int
    do: Callable[[Person, random.Random], None]
    to: Literal["", "accounts", "agents"] = ""
    least: int = 1


class Crowd:
    """All of them, what they do, and what came of it."""

    def __init__(self, people: Sequence[Person], mail: MailCatcher) -> None:
        """Choose; nobody does anything yet."""
        self.people = people
        self.outcome = Outcome()
        self._mail = mail
        self._numbers = itertools.count(1)
        self._next_sign_in = time.monotonic()
        self._lock = threading.Lock()
        self._deck: list[Deed] = []
        self._deeds = [
            Deed(8, self._look),
            Deed(1, self._sign_in),
            Deed(3, self._make_account),
            Deed(1, self._remove_account, "accounts", LEAVING_ONE),
            Deed(1, self._change_password, "accounts"),
            Deed(1, self._empty_queue, "accounts"),
            Deed(1, self._delete_queue, "accounts"),
            Deed(5, self._register),
            Deed(2, self._remove_agent, "agents", LEAVING_ONE),
            Deed(6, self._publish),
            Deed(1, self._change_token),
        ]

    def act(self, chance: random.Random) -> None:
        """Have somebody do something; raises Failed where a request wasn't answered as it should."""
        with self._lock:
            if not self._deck:
                self._deck = [deed for deed in self._deeds for _ in range(deed.times)]
                chance.shuffle(self._deck)
            deed = self._deck.pop()
            able = [
                one
                for one in self.people
                if not one.lock.locked() and (not deed.to or len(getattr(one, deed.to)) >= deed.least)
            ]
            if not able:
                return
            person = chance.choice(able)
            person.lock.acquire()
        try:
            deed.do(person, chance)
        finally:
            person.lock.release()

    def name_of_queue(self, number: int, chance: random.Random) -> str:
        """Give a name for a new queue: mostly an account's, sometimes nobody's or one that follows no pattern."""
        accounts = sorted(self.outcome.accounts)
        if not accounts or chance.random() < 0.1:
            return chance.choice((f"queue/nobody/{number}", f"loose-{number}"))
        return f"queue/{chance.choice(accounts)}/{number}"

    # What they do

    def _look(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance, by_session=True)
        _, content, _ = client.ask("GET", "/api/queues/?page_size=5", what="look at pages")
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
            page = self._note(person, name, lambda: browser.get("/signin/"), 200)
            form = {"csrfmiddlewaretoken": _csrf_token(page), "email": person.email}
            page = self._note(person, name, lambda: browser.post("/signin/", data=form, follow_redirects=True), 200)
            codes = [code[1] for mail in self._mail.to(person.email)[before:] if (code := _CODE.search(mail.text))]
            form = {"csrfmiddlewaretoken": _csrf_token(page), "code": codes[-1] if codes else ""}
            self._note(person, name, lambda: browser.post("/signin/code/", data=form), 302)
            person.session = browser.cookies.get("sessionid") or person.session

    def _note(self, person: Person, name: str, ask: Callable[[], httpx.Response], wanted: int) -> httpx.Response:
        """Ask something of a page that a person signs in by, and note what became of it."""
        began = time.monotonic()
        answer, status, problem = None, 0, ""
        try:
            answer = ask()
            status = answer.status_code
            if status != wanted:
                problem = f"{answer.request.method} {answer.url.path}: {status} {answer.text[:200]!r}"
        except httpx.HTTPError as error:
            problem = f"signing in: {error!r}"
        person.requests.append(Request(name, began, time.monotonic(), problem, "sign in", status))
        if answer is None or problem:
            raise Failed(problem)
        return answer

    def _make_account(self, person: Person, chance: random.Random) -> None:
        name = f"account{next(self._numbers)}"
        owners = {person.email, chance.choice(self.people).email}
        body = {"username": name, "owners": sorted(owners)}
        person.client(chance).ask("POST", "/api/pulse-users/", body, what="make accounts")
        person.accounts.append(name)
        self.outcome.accounts.add(name)

    def _remove_account(self, person: Person, chance: random.Random) -> None:
        name = person.accounts.pop(chance.randrange(len(person.accounts)))
        self.outcome.accounts.discard(name)
        person.client(chance).ask("DELETE", f"/api/pulse-users/{name}/", what="remove accounts")
        self.outcome.removed_accounts.add(name)

    def _change_password(self, person: Person, chance: random.Random) -> None:
        path = f"/api/pulse-users/{chance.choice(person.accounts)}/rotate-password/"
        person.client(chance).ask("POST", path, what="change passwords")

    def _empty_queue(self, person: Person, chance: random.Random) -> None:
        if path := self._path_of_queue(person, chance):
            person.client(chance).ask("POST", f"{path}purge/", what="empty queues", fine=MAY_BE_GONE)

    def _delete_queue(self, person: Person, chance: random.Random) -> None:
        if path := self._path_of_queue(person, chance):
            person.client(chance).ask("DELETE", path, what="delete queues", fine=MAY_BE_GONE)

    def _path_of_queue(self, person: Person, chance: random.Random) -> str:
        _, content, _ = person.client(chance).ask("GET", "/api/queues/?search=queue/", what="look at queues")
        queues = json.loads(content)
        return f"/api/queues/{chance.choice(queues)['uuid']}/" if queues else ""

    def _register(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance)
        wanted = {"offering": person.offering, "name": f"agent{next(self._numbers)}"}
        _, content, _ = client.ask("POST", "/api/agent-identities/", wanted, what="register agents")
        path = f"/api/agent-identities/{(identity := json.loads(content)['uuid'])}"
        types = chance.sample(TYPES, chance.choice((1, 2)))
        if len(types) == 1:
            body = {"offering_uuid": person.offering, "object_type": types[0]}
            _, content, _ = client.ask("POST", f"{path}/create_queue/", body, what="subscribe")
        else:
            _, content, _ = client.ask("POST", f"{path}/register_queue/", {"object_types": types}, what="subscribe")
        answer = json.loads(content)
        queue = Registered(answer["vhost"], answer["queue_name"])
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
        _, content, _ = person.client(chance).ask("POST", path, body, what="publish events")
        answer = json.loads(content)
        everywhere = not answer["skipped"] and not answer["rejected"] and not answer["gone"]
        event = Event(number, person.offering, object_type, began, answer["delivered"], everywhere)
        self.outcome.events.append(event)

    def _change_token(self, person: Person, chance: random.Random) -> None:
        client = person.client(chance)
        body = {"name": f"token{next(self._numbers)}", "days": 30}
        _, content, _ = client.ask("POST", "/api/tokens/", body, what="make tokens")
        client.ask("DELETE", f"/api/tokens/{json.loads(content)['uuid']}/", what="revoke tokens")


def _csrf_token(page: httpx.Response) -> str:
    found = _CSRF_TOKEN.search(page.text)
    return found[1] if found else ""


class Actor(Busy):
    """A thread in which one after the other of a crowd does something."""

    def __init__(self, name: str, crowd: Crowd, pause: float, chance: random.Random) -> None:
        """Choose; ``pause``: seconds between two deeds."""
        super().__init__(name)
        self._crowd = crowd
        self._pause = pause
        self._chance = chance

    def work(self) -> None:
        """Go on until it is ended; what isn't answered is only noted, as the verdict is not here."""
        while not self.ended.wait(self._chance.uniform(0, 2) * self._pause):
            try:
                self._crowd.act(self._chance)
            except Failed:
                continue
