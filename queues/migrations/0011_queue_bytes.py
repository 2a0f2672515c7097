"""Add the bytes of a queue's messages."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0010_settling_nodes")]

    operations = [
        migrations.AddField(
            model_name="queue",
            name="bytes",
            field=models.PositiveBigIntegerField(
                help_text="Of the messages' bodies, as counted every minute; empty: unknown.", null=True
            ),
        ),
    ]
