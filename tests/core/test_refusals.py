"""How the REST API and forms show refusals."""

import json

import pytest
from django import forms
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.test import RequestFactory

from accounts.access.vouching import NotVouched
from accounts.pages.common import add_error
from core.endpoints import at_field
from core.limits import RateLimit, RateLimitExceeded
from core.refusals import Refusal
from core.rest import PROBLEM, exception_handler


def answer_to(error):
    return exception_handler(error, {"request": RequestFactory().post("/api/")})


@pytest.mark.parametrize(
    ("refusal", "body"),
    [
        (Refusal("No 100%.", "name"), {"name": ["No 100%."]}),
        (Refusal("No."), {"non_field_errors": ["No."]}),
        (Refusal("No.", NON_FIELD_ERRORS), {"non_field_errors": ["No."]}),
        (ValidationError({"name": "No."}), {"name": ["No."]}),
    ],
)
def test_an_invalid_value_is_a_400_with_its_field(refusal, body):
    answer = answer_to(refusal)
    assert (answer.status_code, answer.data) == (400, body)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refusal("No.", "name", status=409), 409),
        (NotVouched("No."), 403),
        (RateLimitExceeded(RateLimit("events", 1, 60), 7), 429),
    ],
)
def test_another_status_has_problem_details(refusal, status):
    answer = answer_to(refusal)
    assert (answer.status_code, answer.content_type) == (status, PROBLEM)
    assert (answer.data["status"], answer.data["detail"]) == (status, str(refusal))
    assert answer.headers.get("Retry-After") == ("7" if status == 429 else None)


@pytest.mark.parametrize(
    ("refusal", "field"),
    [(Refusal("No."), "offering_uuid"), (Refusal("No.", "name"), "name"), (ValidationError("No."), "offering_uuid")],
)
def test_an_endpoint_names_the_field_only_if_the_refusal_does_not(refusal, field):
    with pytest.raises(Exception) as caught, at_field("offering_uuid"):
        raise refusal
    assert answer_to(caught.value).data == {field: ["No."]}


def test_an_endpoint_names_no_field_for_another_status():
    with pytest.raises(Refusal), at_field("reason"):
        raise Refusal("No.", status=409)


class NameForm(forms.Form):
    name = forms.CharField()
    email = forms.CharField()


@pytest.mark.parametrize(
    ("refusal", "field"),
    [
        (Refusal("No.", "name"), "name"),
        (Refusal("No."), "email"),
        (Refusal("No.", "owners"), "email"),
        (Refusal("No.", NON_FIELD_ERRORS), NON_FIELD_ERRORS),
        (ValidationError({"name": "No."}), "name"),
        (ValidationError("No."), "email"),
    ],
)
def test_a_form_shows_a_refusal_at_its_field_or_at_the_given_one(refusal, field):
    form = NameForm({"name": "a", "email": "b"})
    assert form.is_valid()
    add_error(form, refusal, "email")
    assert json.loads(form.errors.as_json()) == {field: [{"message": "No.", "code": ""}]}
