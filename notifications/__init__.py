"""Notifications, from the change to the delivery.

``audience.py`` has the recipients, ``mutes.py`` and ``preferences.py`` what each of them chose. ``enqueue.py`` writes
the outbox, and ``sending.py`` delivers it.
"""
