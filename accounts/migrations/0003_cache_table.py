from django.core.management import call_command
from django.db import migrations


def make(apps, schema_editor):
    call_command("createcachetable", database=schema_editor.connection.alias, verbosity=0)


def remove(apps, schema_editor):
    schema_editor.execute("DROP TABLE IF EXISTS guardian_cache")


class Migration(migrations.Migration):
    """The table that sign-in attempts are counted in; see CACHES in the settings."""

    dependencies = [("accounts", "0002_self_service")]

    operations = [migrations.RunPython(make, remove)]
