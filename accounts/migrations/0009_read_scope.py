"""Add the scope of tokens that read, and the Pulse user that one may be restricted to."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0008_pulse_user_help")]

    operations = [
        migrations.AddField(
            "authtoken",
            "pulse_user",
            models.ForeignKey(
                blank=True,
                editable=False,
                help_text="The only Pulse user that the token may read; empty: all of its owner's.",
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="accounts.pulseuser",
            ),
        ),
        migrations.AlterField(
            "authtoken",
            "scope",
            models.CharField(
                choices=[("agent", "Register queues"), ("read", "Read"), ("all", "Do everything")],
                db_default="agent",
                default="agent",
                editable=False,
                max_length=10,
            ),
        ),
    ]
