"""Read an installation file: YAML to wanted resources, or all its problems with their lines and columns."""

import difflib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml
from django.conf import settings
from django.core.exceptions import ValidationError
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError as SchemaViolation

from accounts.models import check_address, normalize_address
from accounts.pulse_users.validation import check_syntax
from agents.models import check_offering_name
from installation.resources import PEOPLE, InvalidFile, Key, Kind, Position, Problem, Wanted
from installation.schema import SCHEMA
from message_store.applications import check_name
from rabbit.names import is_amqp_name

Path = tuple[str | int, ...]
"""Where a value is: keys of mappings, and indexes of lists."""

_TYPES = {
    "object": "a mapping (name: value)",
    "array": "a list ([a, b])",
    "string": "a text, in quotes if it looks like something else",
    "integer": "a whole number",
    "boolean": "true or false",
    "null": "null",
}
_IN_PYTHON = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    bytes: "binary data",
}

# To JSON Schema, 9000.0 is an integer.
_WHOLE = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
_Validator = validators.extend(Draft202012Validator, type_checker=_WHOLE)  # type: ignore[no-untyped-call]


def read(content: bytes) -> list[Wanted]:
    """Return the resources that a file describes.

    Raises:
        InvalidFile: it has problems.
    """
    reader = _Reader(_Document(content))
    wanted = list(reader.wanted())
    if reader.problems:
        raise InvalidFile(reader.problems)
    return wanted


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is most similar to this one, or an empty text."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


class _Document:
    """The data of a YAML document that follows the schema, and the positions of its keys and values."""

    def __init__(self, content: bytes) -> None:
        self.keys: dict[Path, Position] = {}
        self.values: dict[Path, Position] = {}
        self._visited: set[int] = set()
        self._problems: list[Problem] = []
        try:
            self.data = self._value(_compose(content), ())
        except RecursionError:
            raise InvalidFile([Problem(Position(1, 1), "Lists or mappings are nested too deeply.")]) from None
        violations = _Validator(SCHEMA).iter_errors(self.data)
        if problems := self._problems or list(map(self._violation, violations)):
            raise InvalidFile(problems)

    def _violation(self, error: SchemaViolation) -> Problem:
        """Return what is wrong at the place where the schema is violated."""
        path = tuple(error.absolute_path)
        if error.validator != "additionalProperties":
            return Problem(self.values[path], _sentence(error))
        known = error.schema["properties"]  # type: ignore[index]  # a schema with this rule is no bool
        unknown = next(key for key in error.instance if key not in known)
        text = f"There is no '{unknown}' here.{did_you_mean(unknown, known)} Known are: {', '.join(known)}."
        return Problem(self.keys[*path, unknown], text)

    def _add(self, at: Position, text: str) -> None:
        self._problems.append(Problem(at, text))

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self.values[path] = at = _position(node.start_mark)
        if id(node) in self._visited:
            self._add(self.keys.get(path, at), "Aliases (*name) are not supported. Write the value out.")
            return None
        self._visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if node.tag.endswith((":int", ":float")) and ":" in node.value:
            return node.value  # 190:00 is 11,400 only in YAML 1.1
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            self._add(at, f"'{node.value}' can't be read. Put it in quotes if it is a text.")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at, key = _position(key_node.start_mark), key_node.value
            if not (isinstance(key_node, yaml.ScalarNode) and key_node.tag == "tag:yaml.org,2002:str"):
                self._add(at, "A name must be a text. Put it in quotes.")
            elif key in data:
                self._add(at, f"'{key}' is here twice.")
            else:
                self.keys[*path, key] = at
                data[key] = self._value(value_node, (*path, key))
        return data


def _compose(content: bytes) -> yaml.Node:
    try:
        # libyaml's loader would be faster, and crashes when lists are nested too deeply.
        node: yaml.Node | None = yaml.compose(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        before = content[: error.start]
        at = Position(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        text = "This is not UTF-8. Save the file as UTF-8."
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = _position(mark) if mark else Position(1, 1)
        text = f"This is not YAML: {getattr(error, 'problem', '') or ' '.join(str(error).split())}."
    else:
        if node is not None:
            return node
        at, text = Position(1, 1), "The file is empty. Begin it with 'version: 1'."
    raise InvalidFile([Problem(at, text)])


def _position(mark: yaml.Mark) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _sentence(error: SchemaViolation) -> str:
    value, rule = error.instance, error.validator_value
    match error.validator:
        case "type":
            types = [rule] if isinstance(rule, str) else rule
            wanted = " or ".join(_TYPES[one] for one in types)
            return f"This is {_IN_PYTHON.get(type(value), 'null' if value is None else 'a date')}; write {wanted}."
        case "required":
            missing = next(name for name in rule if name not in value)
            return f"'{missing}' is missing here{': write version: 1' if missing == 'version' else ''}."
        case "oneOf":
            return "Write either 'name' or 'pattern' here."
        case "minimum" | "maximum":
            return f"{value} is too {'small' if value < rule else 'large'}; the {error.validator} is {rule}."
        case "minItems" | "maxItems":
            return f"This list has {len(value)} entries; it can have {'at least' if value == [] else 'at most'} {rule}."
        case "minLength":
            return "This is empty."
        case "const":
            return f"Only version {rule} is known. Use the version of Guardian that wrote the file."
    return str(error.message)


class _Reader:
    """Makes resources of data that follows the schema, and checks what the schema can't express."""

    def __init__(self, document: _Document) -> None:
        self._document = document
        self.problems: list[Problem] = []
        self._seen: set[tuple[Kind, Key]] = set()
        self._offerings: dict[str, list[Key]] = {}

    def wanted(self) -> Iterator[Wanted]:
        data = self._document.data
        for email, owner in data.get("owners", {}).items():
            path: Path = ("owners", email)
            yield self._resource(Kind.OWNER, (self._address(email, self._document.keys[path]),), email, owner, path)
        for number, name in enumerate(data.get("applications", [])):
            path = ("applications", number)
            self._check(path, check_name, name)
            yield self._resource(Kind.APPLICATION, (name,), name, {}, path)
        for number, offering in enumerate(data.get("offerings", [])):
            yield self._offering(offering, ("offerings", number))
        for number, queue in enumerate(data.get("queues", [])):
            yield self._queue(queue, ("queues", number))
        for username, pulse_user in data.get("pulse_users", {}).items():
            path = ("pulse_users", username)
            self._check(path, check_syntax, username)
            yield self._resource(Kind.PULSE_USER, (username,), username, pulse_user, path)

    def _offering(self, offering: dict[str, Any], path: Path) -> Wanted:
        self._check((*path, "name"), check_offering_name, offering["name"])
        key: Key = ()
        if "uuid" in offering:
            try:
                key = (uuid.UUID(offering["uuid"]).hex,)
            except ValueError:
                self._add((*path, "uuid"), f"'{offering['uuid']}' is not a UUID.")
        values = {name: value for name, value in offering.items() if name != "uuid"}
        return self._resource(Kind.OFFERING, key, offering["name"], values, path)

    def _queue(self, queue: dict[str, Any], path: Path) -> Wanted:
        what = "name" if "name" in queue else "pattern"
        name, vhost = queue[what], queue.get("vhost", settings.GUARDIAN_PULSE_VHOST)
        for field, text in ((what, name), ("vhost", vhost)):
            if not is_amqp_name(text):
                self._add((*path, field), "RabbitMQ's names have at most 255 bytes.")
        if what == "pattern":
            try:
                re.compile(name)
            except (re.error, OverflowError, RecursionError) as error:
                self._add((*path, what), f"This is not a regular expression: {error}.")
        limits = {field: value for field, value in queue.items() if field not in (what, "vhost")}
        if not limits:
            self._add(path, "No limit is given here. Write warn_length, max_length or unbounded.")
        return self._resource(Kind.QUEUE, (vhost, name), name, limits, path, pattern=name if what == "pattern" else "")

    def _resource(
        self, kind: Kind, key: Key, name: str, data: dict[str, Any], path: Path, *, pattern: str = ""
    ) -> Wanted:
        at = self._document.keys.get(path) or self._document.values[path]
        identity = (kind, key or (name,)) if not pattern else (kind, (*key, "pattern"))
        twins = self._offerings.setdefault(name, []) if kind is Kind.OFFERING else []
        # With UUIDs, offerings can have the same name.
        if identity in self._seen or (twins and not (key and all(twins))):
            self.problems.append(Problem(at, f"'{name}' is here twice."))
        self._seen.add(identity)
        twins.append(key)
        values = dict(data)
        for field in (*PEOPLE.get(kind, ()), "notification_emails"):
            if field in values:
                values[field] = self._addresses(values[field], (*path, field))
        positions = {str(field): self._document.values[*path, field] for field in data}
        return Wanted(kind, key, name, values, at, positions, pattern)

    def _addresses(self, emails: list[str], path: Path) -> list[str]:
        """Return these addresses in normal form, sorted and without duplicates."""
        found = {self._address(email, self._document.values[*path, index]) for index, email in enumerate(emails)}
        return sorted(found)

    def _address(self, email: str, at: Position) -> str:
        address = normalize_address(email)
        try:
            check_address(address)
        except ValidationError as error:
            self.problems.append(Problem(at, f"'{email}' is not an e-mail address. {' '.join(error.messages)}"))
        return address

    def _check(self, path: Path, check: Callable[[str], None], name: str) -> None:
        try:
            check(name)
        except ValidationError as error:
            self._add(path, " ".join(error.messages))

    def _add(self, path: Path, text: str) -> None:
        self.problems.append(Problem(self._document.keys.get(path) or self._document.values[path], text))
