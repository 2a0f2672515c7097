"""Add to the monitor's state: queues that Guardian can't bound, and when queues were deleted for their memory."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0004_archives")]

    operations = [
        migrations.AddField(
            "watch",
            "unguarded",
            models.JSONField(
                default=dict, db_default={}, help_text="The queues that Guardian can't bound, by the reason."
            ),
        ),
        migrations.AddField(
            "watch",
            "relieved_at",
            models.DateTimeField(null=True, help_text="When queues were last deleted for their memory."),
        ),
    ]
