"""The job of the worker processes in test_work_store.py: each message is noted, when it begins and when it ends."""

import json
import os
import signal
import time
from pathlib import Path

NOTES = Path(os.environ.get("WORKING_NOTES", os.devnull))
STOP = Path(os.environ.get("WORKING_STOP", "/nowhere"))
"""Where there is such a file, the process stops itself with a message in hand, and the file goes."""

SECONDS = 0.01


def note(what, message):
    line = json.dumps([what, os.getpid(), message.partition, int(message.body), time.monotonic()])
    with NOTES.open("a") as notes:
        notes.write(f"{line}\n")  # in one piece: it is short


def handle(message, context):
    note("begin", message)
    time.sleep(SECONDS)
    if STOP.exists():
        STOP.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    note("end", message)
