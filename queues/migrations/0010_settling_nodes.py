"""Add the nodes that came back a moment ago to the monitor's state."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0009_labels")]

    operations = [
        migrations.AddField(
            model_name="watch",
            name="settling",
            field=models.JSONField(help_text="The nodes that came back a moment ago, and when.", null=True),
        ),
    ]
