"""What all mails have in common."""

AUTOMATIC_HEADERS = {"Auto-Submitted": "auto-generated", "X-Auto-Response-Suppress": "All"}
"""Headers that keep mail servers from answering, such as that the recipient is on holiday (RFC 3834, Exchange)."""
