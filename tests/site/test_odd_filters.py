"""Values in a query that no database can compare with: no page and no endpoint answers with a server error.

The lists of the administration are in test_admin.py.
"""

import pytest

from accounts.models import Owner
from message_store import applications
from tests.site.test_api_schema import OPERATIONS
from tests.support.api import Program

VALUES = ["\0", "9" * 30, "-1", "1e9999", "nan", "99999-01-01", "0001-01-01T00:00:00+14:00", "$", "{}"]

PAGES = {
    "/": ["page"],
    "/queues/": ["search", "state", "vhost", "pulse_user", "without_consumers", "blocked", "ordering", "page", "shown"],
    "/exchanges/": ["name", "page"],
    "/owners/": ["search", "page"],
    "/pulse-users/": ["search", "page", "adopt"],
    "/agents/": ["search", "page"],
    "/vouching/": ["page"],
    "/tokens/": ["page"],
    "/message-store/": ["search", "application", "queue", "page"],
    "/signin/": ["next"],
    "/signin/oidc/callback/": ["code", "state", "error"],
    "/v1/shop": ["limit", "offset", "details", "include_count"],
    "/v1/shop/q": ["since", "limit", "order", "partitions"],
}

LISTS = [
    (operation.path, [parameter.name for parameter in operation.query])
    for operation in OPERATIONS
    if operation.method.upper() == "GET" and "{" not in operation.path and list(operation.query)
]


def statuses(client, path, names):
    """Return the server errors of a path with each of the values in each of its parameters."""
    answers = [(name, value, client.get(path, {name: value}).status_code) for name in names for value in VALUES]
    return [answer for answer in answers if answer[2] >= 500]


@pytest.fixture
def operator_client(guarded):
    program = Program(Owner.objects.create_superuser("ops@example.org"))
    program.client.force_login(program.owner)
    program.client.raise_request_exception = False
    return program.client


@pytest.mark.parametrize(("path", "names"), LISTS, ids=[path for path, _ in LISTS])
def test_a_list_of_the_api_refuses_odd_values(operator_client, path, names):
    assert statuses(operator_client, path, names) == []


@pytest.mark.parametrize("path", PAGES)
def test_a_page_ignores_or_refuses_odd_values(operator_client, path):
    if path.startswith("/v1/"):
        key = applications.create_key(applications.create_application("shop"))[1]
        operator_client.defaults["HTTP_AUTHORIZATION"] = f"Application {key}"
        operator_client.post("/v1/shop", "queue_name=q", content_type="application/x-www-form-urlencoded")
    assert statuses(operator_client, path, PAGES[path]) == []
