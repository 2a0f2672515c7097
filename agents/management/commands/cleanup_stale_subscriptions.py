from agents.management.commands import cleanup_orphan_queues
from agents.sweeps import stale
from agents.sweeps.reports import Report


class Command(cleanup_orphan_queues.Command):
    help = "Remove the subscriptions and consumers of owners without a valid token, and expired tokens."
    force_help = "ignore the brake on bulk deletion"
    event = "requested a clean-up of stale subscriptions"

    def run(self, *, force: bool, dry_run: bool) -> Report:
        return stale.clean_up_stale(force=force, dry_run=dry_run)
