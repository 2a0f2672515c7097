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
        migrations.CreateModel(
            name='Removal',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('password', "a RabbitMQ user's password"), ('user', 'a RabbitMQ user'), ('vhost', 'a vhost, with all there is in it'), ('queue', 'a queue'), ('account', 'a Pulse user, with its queues and exchanges')], max_length=10)),
                ('vhost', models.CharField(blank=True, help_text='Of a queue.', max_length=255)),
                ('name', models.CharField(max_length=255)),
                ('if_unused', models.BooleanField(default=False, help_text='Only while nobody reads from it.')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('due_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='Nobody is at it, and it may be tried, from here on.')),
                ('claim', models.UUIDField(help_text='Who is at it.', null=True)),
                ('attempts', models.PositiveIntegerField(default=0)),
                ('last_error', models.CharField(blank=True, max_length=300)),
            ],
            options={
                'ordering': ['id'],
                'indexes': [models.Index(fields=['due_at'], name='core_remova_due_at_936bf8_idx')],
                'constraints': [models.UniqueConstraint(fields=('kind', 'vhost', 'name'), name='one_removal_of_a_thing')],
            },
        ),
        migrations.RunPython(create_cache_table, drop_cache_table),
    ]
