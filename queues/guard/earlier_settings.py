"""The settings of the last pass, so that a change of the environment deletes nothing by surprise.

Nobody confirms such a change. The first pass after it deletes only what the earlier settings would delete, too, and
blocks the rest. So does the first pass over a broker: no vhost was guarded before.
"""

from dataclasses import replace
from typing import Any

from queues.guard.pass_run import PassRun, deletion_settings, guarded_vhosts, rules
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
    return None if earlier == current else rules(guarded_vhosts(run.agents_vhosts, earlier), earlier)


def settings_to_store(watch: Watch, observation: Observation) -> dict[str, Any] | None:
    """Return the settings for the next pass to compare with: the current ones, if this list was complete.

    Otherwise queues that this pass did not see may still have to be blocked.
    """
    listing = observation.snapshot
    if not (listing.unlisted or observation.stopped_vhosts or listing.lagging):
        return deletion_settings()
    return None if _is_another_broker(watch, listing) else watch.deletion_settings


def _is_another_broker(watch: Watch, listing: Snapshot) -> bool:
    """Return whether the list is of another cluster than the last complete one.

    Nodes of two brokers may have the same name, such as those in containers. The sides of a split cluster have no node
    in common. So nodes are compared only if a cluster has no id.
    """
    if watch.cluster and listing.cluster:
        return watch.cluster != listing.cluster
    return bool(watch.nodes) and listing.nodes.isdisjoint(watch.nodes)
