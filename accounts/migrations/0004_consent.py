"""Add invitations to own an account, and whether an owner who left may know its password."""

import uuid

import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0003_archives")]

    operations = [
        migrations.AddField(
            model_name="pulseuser",
            name="password_exposed_at",
            field=models.DateTimeField(
                null=True,
                editable=False,
                help_text="When an owner left who may know the password. Empty: it was changed since, or none left.",
            ),
        ),
        migrations.CreateModel(
            name="Invitation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("uuid", models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "closed_at",
                    models.DateTimeField(help_text="When it was declined or withdrawn; empty: it was not.", null=True),
                ),
                (
                    "invitee",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="invitations",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "inviter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="+", to=settings.AUTH_USER_MODEL
                    ),
                ),
                (
                    "pulse_user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="invitations",
                        to="accounts.pulseuser",
                    ),
                ),
            ],
            options={
                "ordering": ["created", "id"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("pulse_user", "invitee"), name="one_invitation_of_an_owner_to_an_account"
                    )
                ],
            },
        ),
    ]
