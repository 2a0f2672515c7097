"""Requests about RabbitMQ users and their permissions."""

from collections.abc import Iterable

from rabbit.entities import User
from rabbit.permissions import Permissions
from rabbit.requests.parsing import parse_object, parse_rows
from rabbit.requests.sending import Requests


class UserRequests(Requests):
    def users(self) -> list[User]:
        answer = self._get("users", params={"columns": "name,tags"})
        return [User(row["name"], frozenset(map(str, row["tags"]))) for row in parse_rows(answer, name=str, tags=list)]

    def user(self, name: str) -> User:
        """Return one user."""
        row = parse_object(self._get("users", name), name=str, tags=list)
        return User(row["name"], frozenset(map(str, row["tags"])))

    def put_user(self, name: str, password: str | None, tags: Iterable[str] = ()) -> bool:
        """Create a user, or replace its password and tags. Return whether it is new.

        With ``password`` None, the user can't log in with a password. An existing user keeps its permissions and
        connections.
        """
        credentials = {"password_hash": ""} if password is None else {"password": password}
        return self._put("users", name, json={**credentials, "tags": ",".join(tags)})

    def delete_user(self, name: str) -> None:
        """Delete a user. The broker closes its connections."""
        self._delete("users", name)

    def permissions_of(self, user: str) -> dict[str, Permissions]:
        """Return a user's permissions by vhost."""
        rows = parse_rows(self._get("users", user, "permissions"), vhost=str, configure=str, write=str, read=str)
        return {row["vhost"]: Permissions(row["configure"], row["write"], row["read"]) for row in rows}

    def all_permissions(self) -> dict[str, dict[str, Permissions]]:
        """Return the permissions of all users that have any, by user and vhost."""
        found: dict[str, dict[str, Permissions]] = {}
        for row in parse_rows(self._get("permissions"), user=str, vhost=str, configure=str, write=str, read=str):
            of_user = found.setdefault(row["user"], {})
            of_user[row["vhost"]] = Permissions(row["configure"], row["write"], row["read"])
        return found

    def set_permissions(self, vhost: str, user: str, permissions: Permissions) -> None:
        """Set a user's permissions on a vhost."""
        self._put("permissions", vhost, user, json=permissions._asdict())
