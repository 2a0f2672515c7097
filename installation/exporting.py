"""Write the present installation, or the plan of an import, as a file."""

from collections.abc import Iterable
from typing import Any

import yaml
from django.conf import settings

from accounts.importing.adoption import Step
from accounts.importing.pulseguardian import CREATE_OPERATOR, PROMOTE
from accounts.models import normalize_address
from installation.resources import DEFAULTS, PEOPLE, Kind, Present, State
from rabbit.names import user_of_queue

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def of_state(state: State) -> str:
    """Return the file that ``apply`` would leave unchanged.

    It lacks deactivated owners, Pulse users that are being created or removed, and the limits of agents' queues, whose
    vhosts have other names in another installation. Comments name what an empty installation would refuse: resources
    whose people are deactivated, have no access, or have an address in a form that no sign-in has any more.
    """
    found: dict[Kind, list[Present]] = {
        kind: sorted((one for one in state.of_kind(kind) if not one.obstacle), key=lambda one: one.key) for kind in Kind
    }
    owners = {
        one.key[0]: dict(one.values)
        for one in found[Kind.OWNER]
        if one.is_whole and one.key[0] == normalize_address(one.key[0])
    }
    usable = {email for email, values in owners.items() if values["access"]}
    left_out, pulse_users, offerings = [], {}, []
    for one in found[Kind.PULSE_USER]:
        if one.is_whole and one.values["owners"] and usable.issuperset(one.values["owners"]):
            pulse_users[one.key[0]] = dict(one.values)
        elif one.is_whole:
            left_out.append(f"the Pulse user {one.key[0]} and limits of its queues")
    for one in found[Kind.OFFERING]:
        lost = [field for field in PEOPLE[Kind.OFFERING] if not usable.issuperset(one.values[field])]
        values = {name: value for name, value in one.values.items() if name not in lost}
        offerings.append({**values, "uuid": one.key[0]})
        left_out += [f"the {field} of the offering {one.key[0]}" for field in lost]
    without = {one.key[0] for one in state.of_kind(Kind.PULSE_USER)} - pulse_users.keys()
    limited = [
        one
        for one in found[Kind.QUEUE]
        if one.values != DEFAULTS[Kind.QUEUE]
        and not (one.key[0] == settings.GUARDIAN_PULSE_VHOST and user_of_queue(one.key[1]) in without)
    ]
    comments = [f"# Left out, because not all people have access: {what}.\n" for what in left_out]
    return "".join(comments) + _as_yaml(
        owners=owners,
        pulse_users=pulse_users,
        queues=[{"name": one.key[1], "vhost": one.key[0], **one.values} for one in limited],
        offerings=offerings,
        applications=[one.key[0] for one in found[Kind.APPLICATION]],
    )


def of_steps(steps: Iterable[Step]) -> str:
    """Return the file that ``apply`` would carry out as an import would these steps."""
    owners: dict[str, Any] = {}
    pulse_users: dict[str, Any] = {}
    queues: list[dict[str, Any]] = []
    for step in steps:
        if not step.is_change:
            continue
        if step.what == "owner":
            is_operator = step.do in (CREATE_OPERATOR, PROMOTE)
            owners[step.name] = {"access": True, **({"operator": True} if is_operator else {})}
        elif step.what == "account":
            pulse_users[step.name] = {"owners": list(step.owners)}
        else:
            queues.append({"name": step.name, "vhost": step.vhost, "unbounded": True})
    return _as_yaml(owners=owners, pulse_users=pulse_users, queues=queues)


def _as_yaml(**sections: Any) -> str:
    data = {"version": 1, **{name: section for name, section in sections.items() if section}}
    text: str = yaml.dump(data, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=120)
    return text
