"""The rules for whether the broker and Guardian are healthy. Pure: no database, no broker, no clock.

Each fact has one rule, and all limits are here. (When the list of queues calls itself late is in
``queues/rules/freshness.py``.) ``facts.py`` measures the values; the front page, ``doctor`` and ``/readyz`` judge them
by these rules. ``/metrics`` exports the value of each rule with a ``metric``, and the alerts in ``deploy/prometheus``
have the same limits: ``tests/status/test_rules.py`` checks them.
"""

from dataclasses import replace

from queues.rules.thresholds import MemoryPressure
from status.verdicts import Rule, Unit

# The broker

BROKER_TIMEOUT_SECONDS = 2.0
"""The timeout of pages and ``/readyz`` for each answer of the broker. It equals the limit of a warning."""

BROKER = Rule(
    name="broker",
    measures="time that the management API takes to answer",
    unit=Unit.SECONDS,
    warning=BROKER_TIMEOUT_SECONDS,
    critical=lambda settings: settings.GUARDIAN_BROKER_TIMEOUT_SECONDS,
    sentence="The broker takes {value} or longer to answer.",
    never="The broker can't be queried: {error}",
    next_step=(
        "Check that RabbitMQ and its management plugin run and are not overloaded, and that RABBITMQ_MANAGEMENT_URL "
        "has the right address, user and password. While Guardian's passes get no answer, nothing is guarded and "
        "nothing is removed."
    ),
    runbook="the-broker-cant-be-queried",
)

NODE_STOPPED = Rule(
    name="nodes",
    measures="a node is stopped",
    critical=1,
    sentence="{node} is not running.",
    next_step=(
        "Start it. Until then its queues are not guarded, and Guardian deletes none of the agents' queues. If it is "
        "gone permanently: rabbitmqctl forget_cluster_node."
    ),
    runbook="a-node-is-not-running",
)

CLUSTER_SPLIT = Rule(
    name="partitions",
    measures="a node has lost others",
    critical=1,
    sentence="{node} has lost {lost}: the cluster is split.",
    next_step="Repair the network between them, then restart the nodes of the smaller side.",
    runbook="the-cluster-is-split",
)

MEMORY_ALARM = Rule(
    name="memory alarm",
    measures="a node's memory alarm is raised",
    critical=1,
    sentence="The memory alarm is raised on {node}: publishers are blocked on all nodes.",
    next_step="Guardian still guards. Purge or delete the longest queues, or give the node more memory.",
    runbook="a-resource-alarm-is-raised",
)

DISK_ALARM = Rule(
    name="disk alarm",
    measures="a node's disk alarm is raised",
    critical=1,
    sentence="The disk alarm is raised on {node}: publishers are blocked on all nodes.",
    next_step="Guardian still guards. Free space on that node's disk, or purge the longest queues.",
    runbook="a-resource-alarm-is-raised",
)

MEMORY = Rule(
    name="memory",
    measures="a node's memory, relative to its watermark",
    unit=Unit.SHARE,
    warning=MemoryPressure.PRESSURE_START,
    sentence="The memory of {node} is at {value} of its watermark.",
    next_step="Above its watermark the broker blocks publishers. See which queues are long, and which grow.",
    runbook="a-resource-alarm-is-raised",
)

DISK = Rule(
    name="disk",
    measures="a node's required disk space, relative to its free space",
    unit=Unit.SHARE,
    warning=0.5,
    sentence="The disk of {node} is nearly full: {figures}.",
    next_step="Below its limit the broker blocks publishers. Free space on that node's disk.",
    runbook="a-resource-alarm-is-raised",
)

FILES = Rule(
    name="file descriptors",
    measures="a node's file descriptors, relative to their limit",
    unit=Unit.SHARE,
    warning=0.9,
    sentence="{node} has few file descriptors left: {figures}.",
    next_step="When none are left, no client can connect. See which clients have many connections, or raise the limit.",
    runbook="file-descriptors-run-out",
)

# Guardian

PASS_SECONDS = Rule(
    name="pass duration",
    measures="duration of the last pass",
    unit=Unit.SECONDS,
    warning=30,
    sentence="The last pass took {value}.",
    next_step="See what keeps RabbitMQ or the database busy, or run passes less often (GUARDIAN_POLL_SECONDS).",
    runbook="passes-are-slow",
    alert="GuardianPassSlow",
    metric="guardian_last_pass_seconds",
)

PASS_AGE = Rule(
    name="passes",
    measures="time since the last pass began",
    unit=Unit.SECONDS,
    # A pass may take 30 s before it counts as slow, and it is recorded at its end.
    warning=lambda settings: 30 + 3 * settings.GUARDIAN_POLL_SECONDS,
    critical=lambda settings: 60 + 3 * settings.GUARDIAN_POLL_SECONDS,
    sentence="The last pass began {value} ago.",
    never="No pass has run yet, so no queue is guarded.",
    next_step=(
        "Check that beat and the worker for the queue 'guarding' are running; 'manage.py doctor' tests the task queue. "
        "Until passes run, run 'manage.py monitor_queues': it guards without them."
    ),
    runbook="no-pass-runs",
    alert="GuardianNoPass",
)

PASS_AGE_IN_OUTAGE = replace(
    PASS_AGE,
    name="passes in an outage",
    # A pass waits up to GUARDIAN_POLL_MAX_SECONDS to begin, and then for the broker's answer.
    warning=lambda settings: 30 + 3 * settings.GUARDIAN_POLL_SECONDS + 2 * settings.GUARDIAN_POLL_MAX_SECONDS,
    critical=lambda settings: 60 + 3 * settings.GUARDIAN_POLL_SECONDS + 2 * settings.GUARDIAN_POLL_MAX_SECONDS,
)

PASS_ERRORS = Rule(
    name="pass errors",
    measures="errors of the last pass that no other line explains",
    unit=Unit.COUNT,
    noun="error",
    warning=1,
    sentence="The last pass reported {value}: {error}",
    next_step="See its report under 'Passes' in /admin/.",
    runbook="passes-report-errors",
    alert="GuardianPassErrors",
    metric="guardian_last_pass_errors",
)

OUTAGE = Rule(
    name="outage",
    measures="passes can't query the broker",
    critical=1,
    sentence="Passes could not query the broker for {duration}, so no queue is guarded.",
    next_step="Guardian tries again by itself. See the errors of the last pass, and the lines about the broker.",
    runbook="the-broker-cant-be-queried",
    alert="GuardianBrokerAway",
    metric="guardian_outage",
)

BRAKE = Rule(
    name="brake",
    measures="the deletion of queues is blocked",
    critical=1,
    sentence="The deletion of {queues} has been blocked for {duration}.",
    next_step=(
        "None of them is deleted until you decide: release them in /admin/, or keep them by starting their consumers "
        "or raising their limits. List them with 'manage.py monitor_queues --once --dry-run'."
    ),
    runbook="the-brake-blocks-deletions",
    alert="GuardianBrakeHeld",
    metric="guardian_brake_held",
    page="operate_brake",
)

BRAKE_RELEASE = Rule(
    name="brake release",
    measures="queues for which the brake is released",
    unit=Unit.COUNT,
    noun="queue",
    warning=1,
    sentence="{by} released the brake for {value}.",
    next_step="The next pass deletes those that are still too long. All other blocked queues stay.",
    runbook="the-brake-blocks-deletions",
)

SHORT_LISTS = Rule(
    name="short lists",
    measures="lists in a row that are empty, or lack more queues than the brake allows",
    unit=Unit.COUNT,
    noun="list",
    warning=1,
    sentence="The broker's list lacks far more stored queues than the brake allows, so none of them is removed.",
    next_step=(
        "A node that stops or starts looks like this. If the queues were removed on purpose, wait for two more passes."
    ),
    runbook="the-brokers-list-lacks-queues",
)

REFUSED = Rule(
    name="refused deletions",
    measures="the broker refuses to delete a queue",
    critical=1,
    sentence="The broker has refused to delete a queue for {duration}.",
    next_step=(
        "The mail to the operators names the queue and the reason. Guardian's user needs all permissions on each vhost."
    ),
    runbook="the-broker-refuses-to-delete-a-queue",
    alert="GuardianDeletionsRefused",
    metric="guardian_deletions_refused",
)

LATE = Rule(
    name="late deletions",
    measures="a recorded deletion has waited for longer than GUARDIAN_DELETE_WAIT_SECONDS",
    critical=1,
    sentence="Recorded deletions have been late for {duration}{stopped}.",
    next_step="Check that the deleter runs: the worker for the queue 'deleting'. Its log has the reasons.",
    runbook="deletions-are-late",
    alert="GuardianQueuesLeftDeleting",
    metric="guardian_deletions_late",
)

UNRESPONSIVE = Rule(
    name="unresponsive queues",
    measures="a queue's process does not respond",
    warning=1,
    sentence="A queue's process has not responded for {duration}; lengths lag by seconds.",
    next_step="Find it with 'rabbitmqctl list_unresponsive_queues'. Restart its node, or delete the queue.",
    runbook="a-queues-process-does-not-respond",
    alert="GuardianQueueUnresponsive",
    metric="guardian_queue_unresponsive",
)

UNADDRESSABLE = Rule(
    name="unaddressable queues",
    measures="queues with a name that no client can use",
    unit=Unit.COUNT,
    noun="queue",
    warning=1,
    sentence="Guardian can't guard {value} with a name that no client can use: {queues}.",
    next_step="Delete them with 'rabbitmqctl eval', as the runbook says, or bound them with an operator policy.",
    runbook="a-queue-cant-be-addressed",
)

STREAMS = Rule(
    name="streams without retention",
    measures="streams that keep all messages",
    unit=Unit.COUNT,
    noun="stream",
    warning=1,
    sentence="Nothing bounds {value} by size or age: {queues}.",
    next_step=(
        "Bound them: rabbitmqctl set_operator_policy -p VHOST streams '^NAME$' "
        "'{\"max-length-bytes\": 10000000000}' --apply-to queues (with your own size)."
    ),
    runbook="a-stream-keeps-all-messages",
)

EXCLUSIVE = Rule(
    name="exclusive queues",
    measures="exclusive queues over their deletion limit",
    unit=Unit.COUNT,
    noun="queue",
    warning=1,
    sentence=(
        "Guardian can't delete {value} over the deletion limit, because each is exclusive to a connection: {queues}."
    ),
    next_step=(
        "Close the connection, or bound such queues: rabbitmqctl set_operator_policy -p VHOST exclusive '^NAME' "
        "'{\"max-length\": 8000}' --apply-to queues (with your own limit)."
    ),
    runbook="an-exclusive-queue-is-over-its-limit",
)

UNCOUNTED = Rule(
    name="uncounted queues",
    measures="quorum queues that the broker has listed without message counts for minutes",
    unit=Unit.COUNT,
    noun="quorum queue",
    warning=1,
    sentence="The broker does not count the messages of {value}: {queues}.",
    next_step=(
        "Start the nodes that are down, or upgrade RabbitMQ. Guardian judges these queues by their ready messages "
        "alone, and does not guard one that gives no answer."
    ),
    runbook="lengths-are-unknown",
)

ORPHANS_BRAKE = Rule(
    name="brake on orphans",
    measures="queues whose deletion by the sweep of orphans is blocked",
    unit=Unit.COUNT,
    noun="queue",
    warning=1,
    sentence="The brake blocks the sweep of orphans: {value} would be deleted at once.",
    next_step="None is deleted. Review them in /admin/ before you delete them there.",
    runbook="the-brake-blocks-a-sweep",
    page="operate_orphans",
)

STALE_BRAKE = replace(
    ORPHANS_BRAKE,
    name="brake on stale subscriptions",
    measures="queues whose deletion by the clean-up of stale subscriptions is blocked",
    sentence="The brake blocks the clean-up of stale subscriptions: {value} would be deleted at once.",
    page="operate_stale",
)

OTHER_TASKS = Rule(
    name="other tasks",
    measures="time since tasks other than passes ran",
    unit=Unit.SECONDS,
    warning=300,  # a task counts consumers each minute
    sentence="Tasks other than passes last ran {value} ago.",
    never="Tasks other than passes have never run.",
    next_step=(
        "Check that the worker for the queue 'celery' runs: it sends mails and does everything else besides passes. "
        "Without Celery, 'manage.py send_notifications' sends the mails."
    ),
    runbook="notifications-wait",
)

NOTIFICATIONS_WAIT = Rule(
    name="outbox",
    measures="time that the oldest notification has waited, not counting its recipient's quiet hours",
    unit=Unit.SECONDS,
    warning=900,
    sentence="The oldest notification has waited for {value}.{error}",
    next_step=(
        "Check that beat and the worker for the queue 'celery' are running, and that the mail server answers. Until "
        "they do, 'manage.py send_notifications --once' sends what is due."
    ),
    runbook="notifications-wait",
    alert="GuardianNotificationsWait",
    metric="guardian_oldest_notification_seconds",
)

NOTIFICATIONS_GIVEN_UP = Rule(
    name="given-up notifications",
    measures="notifications given up within the last two days",
    unit=Unit.COUNT,
    noun="notification",
    warning=1,
    sentence="Guardian gave up {value} after a day of attempts.",
    next_step="See their last error under 'Notifications' in /admin/. Once it is solved, send them again from there.",
    runbook="notifications-were-given-up",
    alert="GuardianNotificationsGivenUp",
    metric="guardian_notifications_given_up",
)

REMOVALS = Rule(
    name="removals",
    measures="time that the oldest removal from the broker has waited",
    unit=Unit.SECONDS,
    warning=1800,
    sentence="The oldest removal from the broker has waited for {value}.",
    next_step="Guardian retries, at least every five minutes. 'Removals' in /admin/ shows the reason for each.",
    runbook="removals-are-pending",
    alert="GuardianRemovalsPending",
    metric="guardian_oldest_removal_seconds",
)

ARCHIVES_FAILED = Rule(
    name="failed archives",
    measures="queues deleted without an archive within the last two days, because archiving failed",
    unit=Unit.COUNT,
    noun="queue",
    warning=1,
    sentence="Guardian could not archive the messages of {value} in the last two days: {error}",
    next_step="See the queues and the reasons under 'Archives' in /admin/, with the filter 'failed'.",
    runbook="archives-fail",
    alert="GuardianArchivesFail",
    metric="guardian_archives_failed",
)

ARCHIVES_FULL = Rule(
    name="size of archives",
    measures="size of all archives, relative to GUARDIAN_ARCHIVE_TOTAL_BYTES",
    unit=Unit.SHARE,
    warning=0.9,
    sentence="Archives take {figures}. At the limit, Guardian deletes the oldest before they expire.",
    next_step="Raise GUARDIAN_ARCHIVE_TOTAL_BYTES if the database has room, or lower GUARDIAN_ARCHIVE_DAYS.",
    runbook="archives-are-full",
)

# Facts that only doctor measures

CLOCK = Rule(
    name="clock",
    measures="difference to this machine's clock",
    unit=Unit.SECONDS,
    warning=5,
    critical=30,
    sentence="It is {value} {way} this machine's.",
    next_step="Synchronize both with NTP: delays, quiet periods and expiries depend on the clock.",
    runbook="the-doctor",
)

LEASE = Rule(
    name="leases",
    measures="time since an unreleased lease expired",
    unit=Unit.SECONDS,
    warning=25 * 3600,  # all tasks with a lease run at least once a day, and take over an expired one
    sentence="A process that held the lease '{lease}' was killed {value} ago, and none has taken it since.",
    next_step="Check that beat and all workers run.",
    runbook="the-doctor",
)

OLDER_ADDRESSES = Rule(
    name="older addresses",
    measures="owners with an address in an older form",
    unit=Unit.COUNT,
    noun="owner",
    warning=1,
    sentence="The address of {value} is stored in an older form: {addresses}.",
    next_step="Check each, and save the owner in /admin/: that stores today's form.",
    runbook="owners-have-one-address",
)

SAME_ADDRESS = Rule(
    name="owners of one address",
    measures="owners have the same address",
    warning=1,
    sentence="Owners have the same address: {addresses}.",
    next_step=(
        "Sign-in leads to the one who signed in last. Assign this owner to the other's Pulse users, and delete the "
        "other in /admin/."
    ),
    runbook="owners-have-one-address",
)

# Writes, which only doctor and /readyz try. Reading may work while nothing can be written.

DATABASE_WRITES = Rule(
    name="database writes",
    measures="the database refuses writes",
    critical=1,
    sentence="Nothing can be written to the database: {error}",
    next_step="Free space on its disk, or connect to the primary: a standby is read-only. Nothing is guarded now.",
    runbook="nothing-can-be-written",
)

TASK_QUEUE = Rule(
    name="task queue",
    measures="the task queue takes no tasks",
    critical=1,
    sentence="The task queue takes no tasks: {error}",
    next_step="Check that it runs and takes writes, and CELERY_BROKER_URL. Without it workers get no tasks.",
    runbook="nothing-can-be-written",
)

FOLDER = Rule(
    name="folder",
    measures="a folder of GUARDIAN_VAR_DIR can't be written",
    critical=1,
    sentence="GUARDIAN_VAR_DIR ({folder}) can't be written: {error}",
    next_step="Make the folder writable for the account that runs Guardian, and free space on its disk.",
    runbook="nothing-can-be-written",
)

MAIL_SERVER = Rule(
    name="mail server",
    measures="the mail server refuses Guardian's mails",
    critical=1,
    sentence="{where} refuses mails from {sender} to {recipient}: {error}",
    next_step="Allow the sender there, or set DEFAULT_FROM_EMAIL to an address that it accepts.",
    runbook="notifications-wait",
)

OF_BROKER = (BROKER, NODE_STOPPED, CLUSTER_SPLIT, MEMORY_ALARM, DISK_ALARM, MEMORY, DISK, FILES)
OF_GUARDIAN = (
    PASS_AGE, PASS_AGE_IN_OUTAGE, PASS_SECONDS, PASS_ERRORS, OUTAGE, BRAKE, BRAKE_RELEASE, SHORT_LISTS, REFUSED, LATE,
    UNRESPONSIVE, UNADDRESSABLE, STREAMS, EXCLUSIVE, UNCOUNTED, ORPHANS_BRAKE, STALE_BRAKE, OTHER_TASKS,
    NOTIFICATIONS_WAIT, NOTIFICATIONS_GIVEN_UP, REMOVALS, ARCHIVES_FAILED, ARCHIVES_FULL,
)  # fmt: skip
OF_DOCTOR = (CLOCK, LEASE, OLDER_ADDRESSES, SAME_ADDRESS, DATABASE_WRITES, TASK_QUEUE, FOLDER, MAIL_SERVER)
RULES = (*OF_BROKER, *OF_GUARDIAN, *OF_DOCTOR)
