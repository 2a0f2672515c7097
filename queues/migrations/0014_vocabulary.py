"""Rename fields, whose columns keep their names, and a label."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0013_fetch_attempts")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RenameField("queue", "folded", "merged"),
                migrations.AlterField(
                    "queue",
                    "merged",
                    models.PositiveIntegerField(
                        db_column="folded",
                        default=0,
                        help_text="The changes in this quiet period that no message reported.",
                    ),
                ),
                migrations.RenameField("watch", "braked", "blocked"),
                migrations.AlterField(
                    "watch",
                    "blocked",
                    models.PositiveIntegerField(
                        db_column="braked",
                        default=0,
                        db_default=0,
                        help_text="The number of queues to delete whose deletion is blocked.",
                    ),
                ),
                migrations.RenameField("watch", "settling", "recovering"),
                migrations.AlterField(
                    "watch",
                    "recovering",
                    models.JSONField(
                        db_column="settling",
                        null=True,
                        help_text="The nodes that came back a moment ago, and when.",
                    ),
                ),
            ]
        ),
    ]
