"""How a command that runs on ends."""

import signal
import threading


def requested_by_signals() -> threading.Event:
    """Return an event that SIGTERM and Ctrl-C set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: a handler that sets the event would wait forever if it interrupts the event's own wait().
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    return stop
