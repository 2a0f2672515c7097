import django.db.models.deletion
import uuid
from django.conf import settings
from django.db import migrations, models


def leave_room_for_new_lengths(apps, schema_editor):
    """Have PostgreSQL fill each page of the table to 60 % only.

    An update writes a whole new row. Where its page has room and no indexed column changed, no index is written, and
    the next reader of the page removes the old row: a thousand passes over changing queues cost no more than one.
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
                ('failures', models.PositiveIntegerField(default=0, help_text='Passes in a row that could not ask the broker.')),
                ('outage_since', models.DateTimeField(help_text="Since when it can't be listed, as operators know.", null=True)),
                ('nodes', models.JSONField(default=list, help_text='The running nodes at the last complete list.')),
                ('listed_at', models.DateTimeField(help_text='When the last complete list was taken.', null=True)),
                ('exact_at', models.DateTimeField(help_text='When one was last taken with exact lengths.', null=True)),
                ('short_lists', models.PositiveIntegerField(default=0, help_text='Lists in a row that lacked far too many queues.')),
                ('short_told_at', models.DateTimeField(help_text='When operators last heard of a list far too short.', null=True)),
                ('refused_since', models.DateTimeField(help_text='Since when the broker refuses to delete a queue.', null=True)),
                ('unresponsive_since', models.DateTimeField(help_text="Since when a queue's process doesn't answer.", null=True)),
                ('next_pass_at', models.DateTimeField(help_text='No pass before, because the broker is away.', null=True)),
                ('brake_since', models.DateTimeField(help_text='Since when the brake on bulk deletion holds.', null=True)),
                ('braked', models.PositiveIntegerField(db_default=0, default=0, help_text='Queues that the brake keeps.')),
                ('released', models.JSONField(help_text='The queues that may go all the same, as an operator said: vhost and name of each.', null=True)),
                ('released_at', models.DateTimeField(help_text='When an operator released the brake; empty: used up.', null=True)),
                ('released_by', models.CharField(db_default='', default='', help_text="That operator's address.", max_length=254)),
                ('exchanges_listed_at', models.DateTimeField(null=True)),
                ('consumers_counted_at', models.DateTimeField(help_text='When consumers were last counted.', null=True)),
                ('misnamed_exchanges', models.JSONField(default=list)),
                ('thinned_by_minute', models.DateTimeField(help_text='Up to where samples are one a minute.', null=True)),
                ('thinned_by_hour', models.DateTimeField(help_text='Up to where samples are one an hour.', null=True)),
            ],
        ),
        migrations.CreateModel(
            name='Pass',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(help_text='When it began.')),
                ('queues', models.PositiveIntegerField(default=0, help_text='Listed, without those that are left alone.')),
                ('new', models.PositiveIntegerField(default=0)),
                ('changed', models.PositiveIntegerField(default=0)),
                ('gone', models.PositiveIntegerField(default=0)),
                ('unknown', models.PositiveIntegerField(default=0, help_text='Of unknown length.')),
                ('warned', models.PositiveIntegerField(default=0)),
                ('recovered', models.PositiveIntegerField(default=0)),
                ('deleted', models.PositiveIntegerField(default=0)),
                ('kept', models.PositiveIntegerField(default=0, help_text='After the second look.')),
                ('misnamed', models.PositiveIntegerField(default=0)),
                ('unpatterned', models.PositiveIntegerField(default=0)),
                ('misnamed_exchanges', models.PositiveIntegerField(default=0)),
                ('brake_held', models.BooleanField(default=False)),
                ('errors', models.JSONField(default=list, help_text='In words.')),
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
                ('node', models.CharField(blank=True, help_text='The node that its leader was last seen on.', max_length=255)),
                ('registered', models.BooleanField(default=False, help_text='Made here for an agent, with limits of its own on the broker; never deleted for it.')),
                ('ready', models.PositiveBigIntegerField(help_text='Messages; empty: unknown, which is not 0.', null=True)),
                ('unacknowledged', models.PositiveBigIntegerField(help_text='Messages; empty: unknown, which is not 0.', null=True)),
                ('state', models.CharField(choices=[('ok', 'all right'), ('warned', 'over its warn length'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', max_length=10)),
                ('misses', models.PositiveSmallIntegerField(default=0, help_text='How many complete lists in a row lacked it.')),
                ('delete_sent_at', models.DateTimeField(help_text='Set right before the broker is asked to delete it, so that a crash in between is seen.', null=True)),
                ('over_unacked_since', models.DateTimeField(help_text='Since when every list shows it over its limit only with unacknowledged messages; see thresholds.', null=True)),
                ('consumers', models.PositiveIntegerField(help_text='At the last count, a minute ago at most; empty: unknown.', null=True)),
                ('unattended_since', models.DateTimeField(help_text='Since when it is known to have no consumer.', null=True)),
                ('unattended_told_at', models.DateTimeField(help_text='When its owners were told of that.', null=True)),
                ('taken_out', models.PositiveBigIntegerField(help_text="Messages by the broker's own count, when some were waiting at the last count; else empty.", null=True)),
                ('stalled_since', models.DateTimeField(help_text='Since when that count is the same, with messages waiting and consumers there.', null=True)),
                ('stalled_told_at', models.DateTimeField(help_text='When its owners were told of that.', null=True)),
                ('warn_length', models.PositiveIntegerField(blank=True, help_text='Its own, in messages.', null=True)),
                ('max_length', models.PositiveIntegerField(blank=True, help_text='Its own, in messages.', null=True)),
                ('unbounded', models.BooleanField(default=False, help_text='Warned about, never deleted.')),
                ('said', models.CharField(choices=[('ok', 'all right'), ('warned', 'over its warn length'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', help_text='Where it stands by the last message sent.', max_length=10)),
                ('quiet_until', models.DateTimeField(help_text='The end of the quiet period that a warning opened.', null=True)),
                ('recovery_said', models.BooleanField(default=False, help_text="Whether this quiet period's one recovery went out.")),
                ('folded', models.PositiveIntegerField(default=0, help_text='Changes in this quiet period that nobody was told of.')),
                ('first_seen', models.DateTimeField()),
                ('last_seen', models.DateTimeField(help_text='When the row was last written with the queue there. While its misses are 0 it is there now.')),
                ('owner', models.ForeignKey(blank=True, help_text='By its vhost: whose agents registered it.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='agents_queues', to=settings.AUTH_USER_MODEL)),
                ('pulse_user', models.ForeignKey(blank=True, help_text='By its name.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='queues', to='accounts.pulseuser')),
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
                ('details', models.JSONField(default=dict, help_text='The figures that it was decided by.')),
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
