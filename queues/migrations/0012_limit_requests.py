"""Add the kinds of event of requests for a higher limit."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("queues", "0011_queue_bytes"),
    ]

    operations = [
        migrations.AlterField(
            model_name="queueevent",
            name="kind",
            field=models.CharField(
                choices=[
                    ("warned", "reached its warning threshold"),
                    ("recovered", "back to normal"),
                    ("condemned", "over its deletion limit"),
                    ("kept", "kept after a recheck"),
                    ("deleted", "deleted by Guardian"),
                    ("gone", "no longer on the broker"),
                    ("returned", "back on the broker"),
                    ("removing", "deletion requested"),
                    ("removed", "deleted"),
                    ("purged", "purged"),
                    ("adjusted", "limits changed"),
                    ("asked", "higher limit requested"),
                    ("declined", "higher limit declined"),
                    ("skipped", "skipped when an event was published"),
                    ("rejected", "full when an event was published"),
                ],
                max_length=10,
            ),
        ),
    ]
