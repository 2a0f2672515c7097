"""What became of a queue's messages: archived, dropped, held."""

from dataclasses import dataclass
from typing import Any

from core.formatting import counted
from queues.models import Archive


@dataclass
class Removed:
    """The outcome for the messages of a deleted or purged queue.

    ``dropped`` counts ready messages that were not archived. ``why_not`` is the reason if there is no archive.
    """

    archive: Archive | None = None
    dropped: int = 0
    held: int = 0
    why_not: str = ""

    @property
    def archived(self) -> int:
        return self.archive.messages if self.archive else 0

    def as_facts(self) -> dict[str, Any]:
        return {
            "archived": self.archived,
            "dropped": self.dropped,
            "held": self.held,
            "why_not_archived": self.why_not,
            "archive": self.archive.uuid.hex if self.archive else "",
            "archived_until": self.archive.expires.isoformat() if self.archive else "",
        }


def outcome_in_words(removed: Removed) -> str:
    sentences = []
    if removed.archive is not None and removed.archived:
        until = f"{removed.archive.expires:%-d %B %Y}"
        sentences.append(f"Archived until {until}: {counted(removed.archived, 'message')}.")
    if removed.dropped:
        why = f", because {removed.why_not}" if removed.why_not else ""
        sentences.append(f"Deleted without a copy: {counted(removed.dropped, 'message')}{why}.")
    return " ".join(sentences)
