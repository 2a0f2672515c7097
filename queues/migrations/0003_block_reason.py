"""Record on each queue why its deletion is blocked, and with each pass the settings that decide about deletions."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0002_plain_names")]

    operations = [
        migrations.AddField(
            model_name="queue",
            name="block_reason",
            field=models.CharField(
                blank=True,
                choices=[
                    ("brake", "too many at once"),
                    ("settings", "settings or broker are new"),
                ],
                db_default="",
                default="",
                help_text=(
                    "Why Guardian does not delete it until an operator releases it; empty: its deletion is not "
                    "blocked."
                ),
                max_length=10,
            ),
        ),
        migrations.AddField(
            model_name="watch",
            name="deletion_settings",
            field=models.JSONField(
                help_text="The settings that decide which queues are deleted, as of the last complete list.", null=True
            ),
        ),
        migrations.AlterField(
            model_name="watch",
            name="brake_since",
            field=models.DateTimeField(help_text="Since when deletions are blocked.", null=True),
        ),
        migrations.AlterField(
            model_name="watch",
            name="braked",
            field=models.PositiveIntegerField(
                db_default=0, default=0, help_text="The number of queues to delete whose deletion is blocked."
            ),
        ),
    ]
