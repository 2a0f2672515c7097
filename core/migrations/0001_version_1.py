import django.db.models.functions.datetime
from django.core.management import call_command
from django.db import migrations, models


def create_cache_table(apps, schema_editor):
    """Create the table of Django's cache, in which rate limits and locks are kept; see CACHES in the settings."""
    call_command("createcachetable", database=schema_editor.connection.alias, verbosity=0)


def drop_cache_table(apps, schema_editor):
    schema_editor.execute("DROP TABLE IF EXISTS guardian_cache")


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Lease',
            fields=[
                ('name', models.CharField(max_length=300, primary_key=True, serialize=False)),
                ('holder', models.UUIDField(null=True)),
                ('expires_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
        ),
        migrations.RunPython(create_cache_table, drop_cache_table),
    ]
