"""Add the id of the guarded cluster to the monitor's state."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0006_alarms")]

    operations = [
        migrations.AddField(
            "watch",
            "cluster",
            models.CharField(
                max_length=255, default="", db_default="", help_text="The id of the cluster that was last listed."
            ),
        ),
    ]
