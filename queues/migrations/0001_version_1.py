import django.db.models.deletion
import uuid
from django.conf import settings
from django.db import migrations, models


def leave_room_for_new_lengths(apps, schema_editor):
    """Let PostgreSQL fill each page of the table to 60 % only.

    An update writes a new row. If its page has room and no indexed column changed, PostgreSQL updates no index, and the
    next read of the page removes the old row (a HOT update). So a thousand passes leave the table as small as one.
    """
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("ALTER TABLE queues_queue SET (fillfactor = 60)")


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0001_version_1'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Watch',
            fields=[
                ('id', models.PositiveSmallIntegerField(default=1, primary_key=True, serialize=False)),
                ('failures', models.PositiveIntegerField(default=0, help_text='Passes in a row that could not reach the broker.')),
                ('outage_since', models.DateTimeField(help_text='When the reported outage of the broker began.', null=True)),
                ('nodes', models.JSONField(default=list, help_text='The running nodes at the last complete list.')),
                ('listed_at', models.DateTimeField(help_text='When the last complete list was fetched.', null=True)),
                ('exact_at', models.DateTimeField(help_text='When a list with exact lengths was last fetched.', null=True)),
                ('short_lists', models.PositiveIntegerField(default=0, help_text='Lists in a row that lacked too many queues.')),
                ('short_told_at', models.DateTimeField(help_text='When operators were last notified of a list that is too short.', null=True)),
                ('refused_since', models.DateTimeField(help_text='When the broker began to refuse to delete a queue.', null=True)),
                ('unresponsive_since', models.DateTimeField(help_text="When a queue's process stopped responding.", null=True)),
                ('next_pass_at', models.DateTimeField(help_text='The earliest time of the next pass, after the broker could not be reached.', null=True)),
                ('brake_since', models.DateTimeField(help_text='When the brake began to block deletions.', null=True)),
                ('braked', models.PositiveIntegerField(db_default=0, default=0, help_text='The number of queues that the brake blocks.')),
                ('released', models.JSONField(help_text='The queues that an operator released: vhost and name of each.', null=True)),
                ('released_at', models.DateTimeField(help_text='When an operator released the brake; empty: no release is open.', null=True)),
                ('released_by', models.CharField(db_default='', default='', help_text="The operator's e-mail address.", max_length=254)),
                ('exchanges_listed_at', models.DateTimeField(null=True)),
                ('consumers_counted_at', models.DateTimeField(help_text='When consumers were last counted.', null=True)),
                ('misnamed_exchanges', models.JSONField(default=list)),
                ('thinned_by_minute', models.DateTimeField(help_text='Samples before this time are thinned to one a minute.', null=True)),
                ('thinned_by_hour', models.DateTimeField(help_text='Samples before this time are thinned to one an hour.', null=True)),
            ],
        ),
        migrations.CreateModel(
            name='Pass',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(help_text='When the pass began.')),
                ('queues', models.PositiveIntegerField(default=0, help_text='Listed queues, without the ignored ones.')),
                ('new', models.PositiveIntegerField(default=0)),
                ('changed', models.PositiveIntegerField(default=0)),
                ('gone', models.PositiveIntegerField(default=0)),
                ('unknown', models.PositiveIntegerField(default=0, help_text='Queues of unknown length.')),
                ('warned', models.PositiveIntegerField(default=0)),
                ('recovered', models.PositiveIntegerField(default=0)),
                ('deleted', models.PositiveIntegerField(default=0)),
                ('kept', models.PositiveIntegerField(default=0, help_text='Kept after the recheck.')),
                ('misnamed', models.PositiveIntegerField(default=0)),
                ('unpatterned', models.PositiveIntegerField(default=0)),
                ('misnamed_exchanges', models.PositiveIntegerField(default=0)),
                ('brake_held', models.BooleanField(default=False)),
                ('errors', models.JSONField(default=list, help_text='Error messages.')),
                ('seconds', models.FloatField(default=0)),
                ('listing_seconds', models.FloatField(default=0)),
            ],
            options={
                'verbose_name_plural': 'passes',
                'ordering': ['-at'],
                'indexes': [models.Index(fields=['-at'], name='queues_pass_at_6fc881_idx')],
            },
        ),
        migrations.CreateModel(
            name='Queue',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('vhost', models.CharField(max_length=255)),
                ('name', models.CharField(max_length=255)),
                ('type', models.CharField(max_length=255)),
                ('durable', models.BooleanField()),
                ('auto_delete', models.BooleanField()),
                ('exclusive', models.BooleanField()),
                ('node', models.CharField(blank=True, help_text="The node of the queue's leader, as last listed.", max_length=255)),
                ('registered', models.BooleanField(default=False, help_text='Declared for an agent. The broker limits its length; Guardian never deletes it for that.')),
                ('ready', models.PositiveBigIntegerField(help_text='Messages; empty: unknown, which is not 0.', null=True)),
                ('unacknowledged', models.PositiveBigIntegerField(help_text='Messages; empty: unknown, which is not 0.', null=True)),
                ('state', models.CharField(choices=[('ok', 'all right'), ('warned', 'over its warn length'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', max_length=10)),
                ('misses', models.PositiveSmallIntegerField(default=0, help_text='The number of complete lists in a row that lacked the queue.')),
                ('delete_sent_at', models.DateTimeField(help_text='Set before the delete request is sent, so that the next pass detects a crash in between.', null=True)),
                ('over_unacked_since', models.DateTimeField(help_text='Since when all lists show the queue over its limit only with unacknowledged messages.', null=True)),
                ('consumers', models.PositiveIntegerField(help_text='As counted every minute; empty: unknown.', null=True)),
                ('unattended_since', models.DateTimeField(help_text='When a count first found no consumer.', null=True)),
                ('unattended_told_at', models.DateTimeField(help_text='When the owners were notified of it.', null=True)),
                ('taken_out', models.PositiveBigIntegerField(help_text="The broker's count of acknowledged messages; empty: the queue had no messages.", null=True)),
                ('stalled_since', models.DateTimeField(help_text='Since when that count has not risen, with messages and consumers present.', null=True)),
                ('stalled_told_at', models.DateTimeField(help_text='When the owners were notified of it.', null=True)),
                ('warn_length', models.PositiveIntegerField(blank=True, help_text="The queue's own value, in messages.", null=True)),
                ('max_length', models.PositiveIntegerField(blank=True, help_text="The queue's own value, in messages.", null=True)),
                ('unbounded', models.BooleanField(default=False, help_text='Warned about, never deleted for its length.')),
                ('said', models.CharField(choices=[('ok', 'all right'), ('warned', 'over its warn length'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', help_text='The state that the last message reported.', max_length=10)),
                ('quiet_until', models.DateTimeField(help_text='The end of the quiet period that a warning opened.', null=True)),
                ('recovery_said', models.BooleanField(default=False, help_text="Whether this quiet period's one recovery was sent.")),
                ('folded', models.PositiveIntegerField(default=0, help_text='The changes in this quiet period that no message reported.')),
                ('first_seen', models.DateTimeField()),
                ('last_seen', models.DateTimeField(help_text='When the row was last written while the queue existed. With 0 misses the queue exists now.')),
                ('owner', models.ForeignKey(blank=True, help_text='Derived from the vhost: the owner whose agents registered the queue.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='agents_queues', to=settings.AUTH_USER_MODEL)),
                ('pulse_user', models.ForeignKey(blank=True, help_text="Derived from the queue's name.", null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='queues', to='accounts.pulseuser')),
            ],
            options={
                'ordering': ['vhost', 'name'],
            },
        ),
        migrations.CreateModel(
            name='QueueEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('vhost', models.CharField(max_length=255)),
                ('queue_name', models.CharField(max_length=255)),
                ('kind', models.CharField(choices=[('warned', 'passed its warn length'), ('recovered', 'back below its warn length'), ('condemned', 'passed its maximum: to be deleted after another look'), ('kept', 'kept after the second look'), ('deleted', 'deleted by Guardian'), ('gone', 'no longer on the broker'), ('returned', 'back on the broker'), ('removing', 'about to be deleted by hand'), ('removed', 'deleted by hand'), ('purged', 'emptied by hand'), ('adjusted', 'given other limits'), ('skipped', 'left out when an event was published'), ('rejected', 'full when an event was published')], max_length=10)),
                ('at', models.DateTimeField()),
                ('details', models.JSONField(default=dict, help_text='The figures behind the decision.')),
                ('by', models.ForeignKey(help_text='Empty: Guardian itself.', null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                ('queue', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='events', to='queues.queue')),
            ],
            options={
                'ordering': ['-at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='QueueSample',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('length', models.PositiveBigIntegerField(help_text='Messages.')),
                ('queue', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='samples', to='queues.queue')),
            ],
        ),
        migrations.AddIndex(
            model_name='queue',
            index=models.Index(fields=['state'], name='queues_queu_state_42ea35_idx'),
        ),
        migrations.AddConstraint(
            model_name='queue',
            constraint=models.UniqueConstraint(fields=('vhost', 'name'), name='one_row_for_each_queue'),
        ),
        migrations.AddIndex(
            model_name='queueevent',
            index=models.Index(fields=['queue', '-at'], name='queues_queu_queue_i_e04f2f_idx'),
        ),
        migrations.AddIndex(
            model_name='queueevent',
            index=models.Index(fields=['-at'], name='queues_queu_at_1751ae_idx'),
        ),
        migrations.AddIndex(
            model_name='queuesample',
            index=models.Index(fields=['queue', 'at'], name='queues_queu_queue_i_1bba68_idx'),
        ),
        migrations.AddIndex(
            model_name='queuesample',
            index=models.Index(fields=['at'], name='queues_queu_at_c8acad_idx'),
        ),
        migrations.RunPython(leave_room_for_new_lengths, migrations.RunPython.noop),
    ]
