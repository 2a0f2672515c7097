"""Count the bytes of an application's messages."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("message_store", "0001_version_1")]

    operations = [
        migrations.AddField(
            model_name="application",
            name="stored_bytes",
            field=models.BigIntegerField(
                db_default=0,
                default=0,
                editable=False,
                help_text="At least the bytes of its messages. See quota.py.",
            ),
        ),
    ]
