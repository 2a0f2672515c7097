import django.db.models.deletion
import django.db.models.functions.datetime
import message_store.models
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Application',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=50, unique=True)),
                ('created', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Discarded',
            fields=[
                ('contents', models.BigIntegerField(primary_key=True, serialize=False)),
                ('due', models.BigIntegerField(db_index=True, help_text='When to delete the messages, in ticks since 1970.')),
                ('swept', models.BooleanField(default=False, help_text='Deleted once. A second deletion catches messages of a concurrent push.')),
            ],
        ),
        migrations.CreateModel(
            name='MessageRow',
            fields=[
                ('pk', models.CompositePrimaryKey('contents', 'partition', 'ticks', 'rest', blank=True, editable=False, primary_key=True, serialize=False)),
                ('contents', models.BigIntegerField()),
                ('partition', models.PositiveSmallIntegerField()),
                ('ticks', models.BigIntegerField()),
                ('rest', models.BigIntegerField(help_text='The lower 64 bits of the id minus 2^63, to fit a signed integer.')),
                ('body', models.BinaryField()),
                ('content_type', models.CharField(max_length=255)),
                ('expires', models.BigIntegerField(db_index=True, help_text='Ticks since 1970.')),
            ],
        ),
        migrations.CreateModel(
            name='PartitionRow',
            fields=[
                ('pk', models.CompositePrimaryKey('contents', 'partition', blank=True, editable=False, primary_key=True, serialize=False)),
                ('contents', models.BigIntegerField()),
                ('partition', models.PositiveSmallIntegerField()),
                ('last', models.BigIntegerField(help_text='Ticks since 1970.')),
            ],
        ),
        migrations.CreateModel(
            name='ApplicationKey',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('digest', models.CharField(editable=False, help_text='SHA-256, in hex.', max_length=64, unique=True)),
                ('beginning', models.CharField(editable=False, help_text='The first characters, to identify the key.', max_length=8)),
                ('created', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
                ('application', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='keys', to='message_store.application')),
            ],
            options={
                'ordering': ['created', 'id'],
            },
        ),
        migrations.CreateModel(
            name='PartitionLease',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('consumer', models.CharField(max_length=50)),
                ('application', models.CharField(max_length=50)),
                ('queue', models.CharField(max_length=50)),
                ('partition', models.PositiveSmallIntegerField()),
                ('holder', models.UUIDField(null=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('consumer', 'application', 'queue', 'partition'), name='one_lease_for_each_partition')],
            },
        ),
        migrations.CreateModel(
            name='QueueRow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('application', message_store.models.NameField(max_length=50)),
                ('name', message_store.models.NameField(max_length=50)),
                ('created', models.BigIntegerField(help_text='Ticks since 1970.')),
                ('partitions', models.PositiveSmallIntegerField()),
                ('type', models.CharField(max_length=10)),
                ('consistency', models.CharField(max_length=15)),
                ('principals', models.JSONField(default=list)),
                ('contents', models.BigIntegerField(help_text='The number that its messages refer to. Truncation assigns a new one.', unique=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('application', 'name'), name='one_queue_of_a_name')],
            },
        ),
        migrations.CreateModel(
            name='Worker',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.UUIDField(unique=True)),
                ('application', models.CharField(max_length=50)),
                ('consumer', models.CharField(max_length=50)),
                ('beat', models.BigIntegerField(default=0)),
                ('seconds', models.FloatField(help_text='Its leases expire after this time without a heartbeat.')),
            ],
            options={
                'ordering': ['id'],
                'indexes': [models.Index(fields=['application', 'consumer'], name='workers_of_a_consumer')],
            },
        ),
        migrations.CreateModel(
            name='PrincipalRow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('principal', message_store.models.NameField(max_length=300)),
                ('application', message_store.models.NameField(max_length=50)),
                ('name', message_store.models.NameField(max_length=50)),
                ('queue', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='principal_rows', to='message_store.queuerow')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('principal', 'application', 'name'), name='one_row_for_each_principal')],
            },
        ),
        migrations.CreateModel(
            name='Position',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('consumer', models.CharField(max_length=50)),
                ('partition', models.PositiveSmallIntegerField()),
                ('message_id', models.UUIDField()),
                ('queue', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='positions', to='message_store.queuerow')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('queue', 'consumer', 'partition'), name='one_position_for_each_partition')],
            },
        ),
    ]
