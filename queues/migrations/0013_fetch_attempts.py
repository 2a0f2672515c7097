"""Count attempts to archive a queue's messages in the queue's row, where calling off a deletion does not remove them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0012_limit_requests")]

    operations = [
        migrations.AddField(
            model_name="queue",
            name="fetch_attempts",
            field=models.PositiveSmallIntegerField(
                db_default=0,
                default=0,
                help_text="Attempts to archive its messages that are under way or were interrupted.",
            ),
        ),
        migrations.AddField(
            model_name="queue",
            name="attempted_at",
            field=models.DateTimeField(null=True, help_text="When the last attempt to archive its messages began."),
        ),
        migrations.AddField(
            model_name="queue",
            name="returned_at",
            field=models.DateTimeField(
                null=True, help_text="When fetched messages were last returned to it, if that counts as a delivery."
            ),
        ),
        migrations.AlterField(
            model_name="archive",
            name="reason",
            field=models.CharField(
                choices=[
                    ("length", "over its deletion limit"),
                    ("name", "deleted for its name"),
                    ("account", "deleted with its account"),
                    ("deleted", "deleted by a person"),
                    ("purged", "purged by a person"),
                    ("called_off", "its deletion was called off"),
                ],
                max_length=10,
            ),
        ),
        # The column stays for processes of earlier releases.
        migrations.AlterField(
            model_name="archive",
            name="attempt",
            field=models.PositiveSmallIntegerField(db_default=1, default=1),
        ),
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.RemoveField(model_name="archive", name="attempt")]
        ),
    ]
