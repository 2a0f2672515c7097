"""Add the raised alarms and lost nodes to the monitor's state."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0005_unguarded_queues")]

    operations = [
        migrations.AddField(
            model_name="watch",
            name="alarms",
            field=models.JSONField(
                help_text="The raised alarms and the lost nodes: resource, node, and since when.", null=True
            ),
        ),
    ]
