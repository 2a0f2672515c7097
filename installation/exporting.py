"""Write the present installation, or the plan of an import, as a file."""

from collections.abc import Iterable
from typing import Any

import yaml

from accounts.importing.adoption import Step
from accounts.importing.pulseguardian import CREATE_OPERATOR, PROMOTE
from installation.resources import DEFAULTS, Kind, Present, State

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def of_state(state: State) -> str:
    """Return the file that ``apply`` would leave unchanged.

    It lacks deactivated owners, Pulse users that are being created or removed, and the limits of agents' queues, whose
    vhosts have other names in another installation.
    """
    found: dict[Kind, list[Present]] = {
        kind: sorted((one for one in state.of_kind(kind) if not one.obstacle), key=lambda one: one.key) for kind in Kind
    }
    limited = [one for one in found[Kind.QUEUE] if one.values != DEFAULTS[Kind.QUEUE]]
    return _as_yaml(
        owners={one.key[0]: dict(one.values) for one in found[Kind.OWNER] if one.is_whole},
        pulse_users={one.key[0]: _with_owners(one) for one in found[Kind.PULSE_USER] if one.is_whole},
        queues=[{"name": one.key[1], "vhost": one.key[0], **one.values} for one in limited],
        offerings=[{**one.values, "uuid": one.key[0]} for one in found[Kind.OFFERING]],
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


def _with_owners(pulse_user: Present) -> dict[str, Any]:
    """Return the values of a Pulse user. One whose owners are all deactivated keeps them."""
    return {name: value for name, value in pulse_user.values.items() if name != "owners" or value}


def _as_yaml(**sections: Any) -> str:
    data = {"version": 1, **{name: section for name, section in sections.items() if section}}
    text: str = yaml.dump(data, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=120)
    return text
