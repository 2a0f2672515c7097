"""Add the scope of tokens. Existing tokens keep their rights."""

from django.db import migrations, models


def scope(db_default):
    return models.CharField(
        choices=[("agent", "Register queues"), ("all", "Do everything")],
        db_default=db_default,
        default="agent",
        editable=False,
        max_length=10,
    )


class Migration(migrations.Migration):
    dependencies = [("accounts", "0004_consent")]

    operations = [
        migrations.AddField("authtoken", "scope", scope(db_default="all")),  # the value of existing rows
        migrations.AlterField("authtoken", "scope", scope(db_default="agent")),
    ]
