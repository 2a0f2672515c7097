"""The callback of the worker processes in test_work_store.py, which records the start and end of each message."""

import json
import os
import signal
import time
from pathlib import Path

NOTES = Path(os.environ.get("WORKING_NOTES", os.devnull))
STOP = Path(os.environ.get("WORKING_STOP", "/nowhere"))
"""If this file exists, the process deletes it and stops itself with a message in hand."""

SECONDS = 0.01


def note(what, message):
    line = json.dumps([what, os.getpid(), message.partition, int(message.body), time.monotonic()])
    with NOTES.open("a") as notes:
        notes.write(f"{line}\n")  # one write, since it is short


def handle(message, context):
    note("begin", message)
    time.sleep(SECONDS)
    if STOP.exists():
        STOP.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    note("end", message)
