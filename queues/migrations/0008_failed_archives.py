"""Keep the rows of archives that failed, with the reason."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("queues", "0007_cluster")]

    operations = [
        migrations.AddField(
            model_name="archive",
            name="error",
            field=models.CharField(blank=True, db_default="", default="", help_text="Why it failed.", max_length=300),
        ),
        migrations.AlterField(
            model_name="archive",
            name="state",
            field=models.CharField(
                choices=[
                    ("open", "being written"),
                    ("fetched", "complete, and the queue not yet deleted"),
                    ("kept", "kept"),
                    ("failed", "failed; it has no messages"),
                ],
                default="open",
                max_length=10,
            ),
        ),
    ]
