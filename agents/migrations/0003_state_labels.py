"""Change labels of states and reports."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('agents', '0002_services'),
    ]

    operations = [
        migrations.AlterField(
            model_name='consumer',
            name='state',
            field=models.CharField(choices=[('creating', 'being created'), ('ready', 'ready')], default='creating', max_length=10),
        ),
        migrations.AlterField(
            model_name='subscriptionqueue',
            name='state',
            field=models.CharField(choices=[('creating', 'being created'), ('ready', 'ready')], default='creating', max_length=10),
        ),
        migrations.AlterField(
            model_name='sweep',
            name='kind',
            field=models.CharField(choices=[('orphans', 'queues that no agent registered'), ('stale', 'subscriptions whose owner has no valid token')], max_length=10),
        ),
    ]
