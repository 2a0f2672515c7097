"""Measure the messages of an application in a task."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("message_store", "0002_stored_bytes")]

    operations = [
        migrations.AddField(
            model_name="application",
            name="measure_above",
            field=models.BigIntegerField(
                db_default=0,
                default=0,
                editable=False,
                help_text="A task measures the messages if stored_bytes is more.",
            ),
        ),
    ]
