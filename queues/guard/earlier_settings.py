"""The settings of the last pass, so that a change of the environment deletes nothing by surprise.

Nobody confirms such a change. The first pass after it deletes only what the earlier settings would delete, too, and
blocks the rest. So does the first pass over a broker: no vhost was guarded before.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from queues.guard.pass_run import PassRun, deletion_settings, rules
from queues.models import Watch
from queues.rules import thresholds
from queues.rules.rows import Observation, Rules
from rabbit.snapshot import Snapshot


def earlier_rules(run: PassRun, listing: Snapshot) -> Rules | None:
    """Return the rules of the last pass over this broker; None: they are the same as now."""
    current, stored = deletion_settings(), run.watch.deletion_settings
    nothing_guarded = replace(run.rules, vhosts=frozenset())
    if stored is None or _is_another_broker(run.watch, listing):
        return nothing_guarded
    earlier = current | stored
    if earlier["GUARDIAN_THRESHOLD_POLICY"] not in thresholds.POLICIES:
        return nothing_guarded  # a policy that no longer exists
    return None if earlier == current else rules(run.agents_vhosts, earlier)


def settings_to_store(watch: Watch, observation: Observation) -> dict[str, Any] | None:
    """Return the settings for the next pass to compare with: the current ones, if this list was complete.

    Otherwise queues that this pass did not see may still have to be blocked.
    """
    listing = observation.snapshot
    if not (listing.unlisted or observation.stopped_vhosts or listing.lagging):
        return deletion_settings()
    return None if _is_another_broker(watch, listing) else watch.deletion_settings


def is_another_broker(watch: Watch, cluster: str, members: Collection[str]) -> bool:
    """Return whether the id or the nodes of a cluster show that it is not the one of the last complete list.

    Nodes of two brokers may have the same name, such as those in containers. Exported definitions contain the id, so a
    broker that imported them has the id of another. ``members`` includes nodes that are down: the sides of a split
    cluster have no running node in common. An empty id or list is unknown.
    """
    has_another_id = bool(watch.cluster and cluster) and watch.cluster != cluster
    return has_another_id or (bool(watch.nodes and members) and frozenset(watch.nodes).isdisjoint(members))


def _is_another_broker(watch: Watch, listing: Snapshot) -> bool:
    return is_another_broker(watch, listing.cluster, listing.nodes | listing.down)
