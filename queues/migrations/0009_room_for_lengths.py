"""Leave room for new lengths of queues in each page that is written from now on. PostgreSQL alone has such pages.

An update writes a whole new row. Where its page has room, and no index is about what changed, no index is written, and
the next visitor of the page clears the old row away: a pass over queues that change costs no more after a thousand
passes than after one.
"""

from typing import Any

from django.db import migrations


def _set(part: str) -> Any:
    def change(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(f"ALTER TABLE queues_queue {part}")

    return change


class Migration(migrations.Migration):
    dependencies = [("queues", "0008_removed_queues")]

    operations = [migrations.RunPython(_set("SET (fillfactor = 60)"), _set("RESET (fillfactor)"))]
