"""How commands that run on end."""

import os
import signal

from core import stopping


def test_a_signal_that_interrupts_the_wait_for_it_blocks_nothing():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        stop = stopping.requested_by_signals()
        with stop._cond:  # as Event.wait() does
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
