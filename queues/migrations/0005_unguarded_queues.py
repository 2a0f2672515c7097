"""Add the queues that Guardian can't bound to the monitor's state."""

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
    ]
