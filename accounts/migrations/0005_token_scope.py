"""Add the scope of tokens."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0004_consent")]

    operations = [
        migrations.AddField(
            model_name="authtoken",
            name="scope",
            field=models.CharField(
                choices=[("agent", "Register queues"), ("all", "Do everything")],
                db_default="agent",
                default="agent",
                editable=False,
                max_length=10,
            ),
        ),
    ]
