"""Change labels of states and events."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('queues', "0007_cluster"),
    ]

    operations = [
        migrations.AlterField(
            model_name='queue',
            name='notified_state',
            field=models.CharField(choices=[('ok', 'healthy'), ('warned', 'over its warning threshold'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', help_text='The state that the last message reported.', max_length=10),
        ),
        migrations.AlterField(
            model_name='queue',
            name='state',
            field=models.CharField(choices=[('ok', 'healthy'), ('warned', 'over its warning threshold'), ('deleting', 'about to be deleted'), ('gone', 'gone')], default='ok', max_length=10),
        ),
        migrations.AlterField(
            model_name='queueevent',
            name='kind',
            field=models.CharField(choices=[('warned', 'reached its warning threshold'), ('recovered', 'back below its warning threshold'), ('condemned', 'passed its deletion limit; to be deleted after a recheck'), ('kept', 'kept after the recheck'), ('deleted', 'deleted by Guardian'), ('gone', 'no longer on the broker'), ('returned', 'back on the broker'), ('removing', 'about to be deleted manually'), ('removed', 'deleted manually'), ('purged', 'purged manually'), ('adjusted', 'limits changed'), ('skipped', 'skipped when an event was published'), ('rejected', 'full when an event was published')], max_length=10),
        ),
    ]
