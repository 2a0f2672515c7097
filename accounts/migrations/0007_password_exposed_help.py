from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0006_labels")]

    operations = [
        migrations.AlterField(
            model_name="pulseuser",
            name="password_exposed_at",
            field=models.DateTimeField(
                editable=False,
                help_text="When the account lost an owner who may know the password: the owner left, was removed or was "
                "deactivated. Empty: there is none, or the password was changed since.",
                null=True,
            ),
        ),
    ]
