"""Add the group of a notification."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("notifications", "0001_version_1")]

    operations = [
        migrations.AddField(
            model_name="notification",
            name="group",
            field=models.UUIDField(
                help_text=(
                    "Shared by the notifications of one pass: many to one recipient are sent as one message."
                ),
                null=True,
            ),
        ),
    ]
