import django.db.models.deletion
import notifications.kinds
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Notification',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('kind', models.CharField(choices=notifications.kinds.choices, max_length=20)),
                ('about', models.CharField(help_text="The subject's key, such as “queue 7”. Messages about one subject reach one recipient in order.", max_length=40)),
                ('channel', models.CharField(default='email', help_text='email, or the hex UUID of a channel.', max_length=40)),
                ('recipient', models.CharField(max_length=254)),
                ('facts', models.JSONField(help_text='The content of the message, as of its creation.')),
                ('state', models.CharField(choices=[('due', 'to be sent'), ('sending', 'being sent'), ('sent', 'sent'), ('failed', 'given up')], default='due', max_length=10)),
                ('created', models.DateTimeField()),
                ('due_at', models.DateTimeField()),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('claim', models.UUIDField(help_text="The UUID of the sender's claim.", null=True)),
                ('sent_at', models.DateTimeField(null=True)),
                ('last_error', models.TextField(blank=True)),
                ('deferred_until', models.DateTimeField(help_text="The end of its recipient's quiet hours.", null=True)),
            ],
            options={
                'ordering': ['id'],
                'indexes': [models.Index(fields=['state', 'due_at'], name='notificatio_state_bfe879_idx'), models.Index(fields=['recipient', 'about'], name='notification_about')],
            },
        ),
        migrations.CreateModel(
            name='Channel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('name', models.CharField(max_length=100)),
                ('service', models.CharField(editable=False, help_text='The service and host, as pages show them.', max_length=100)),
                ('sealed_url', models.TextField(editable=False)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('last_sent_at', models.DateTimeField(editable=False, null=True)),
                ('last_error', models.CharField(blank=True, editable=False, max_length=300)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='channels', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['name'],
                'constraints': [models.UniqueConstraint(fields=('owner', 'name'), name='one_channel_of_a_name_for_an_owner')],
            },
        ),
    ]
