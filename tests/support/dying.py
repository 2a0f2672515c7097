"""A consumer with a transaction that kills itself before a step: `python -m tests.support.dying GUARD STEP`.

It uses only the necessary parts of Django. DATABASE has Django's settings of the database as JSON.
"""

import json
import os
import signal
import sys
from functools import partial

import django
from django.conf import settings
from django.db import connection, transaction

from guardian_consumers import Consumer, Publisher, Settings
from guardian_consumers.django import in_transaction, once

COMMIT, PUBLISH, NOTE, ACKNOWLEDGE = STEPS = "commit", "publish", "note", "acknowledge"


def shipping(guard, before=lambda step: None):
    """Return a callback that writes a row and publishes an invoice, and calls ``before`` with each step."""

    def work(message):
        with connection.cursor() as cursor:
            if guard == "rewrite":
                cursor.execute("DELETE FROM shop_work WHERE message = %s", [message.id])
            cursor.execute("INSERT INTO shop_work (message) VALUES (%s)", [message.id])
        message.publish({"of": message.id}, "invoices", mandatory=True)
        before(COMMIT)
        transaction.on_commit(partial(before, PUBLISH))

    guarded = {"once": once, "rewrite": in_transaction}[guard](work)

    def callback(message):
        guarded(message)
        before(ACKNOWLEDGE)

    return callback


def main(guard, where):
    settings.configure(
        DATABASES={"default": json.loads(os.environ["DATABASE"])},
        INSTALLED_APPS=["guardian_consumers.processed"],
        USE_TZ=True,
    )
    django.setup()
    send = Publisher.send

    def before(step):
        if step == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def send_and_hear(self, *args, **options):
        send(self, *args, **options)
        before(NOTE)

    Publisher.send = send_and_hear
    Consumer(Settings.from_environment(), where, shipping(guard, before)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
