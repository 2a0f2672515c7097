import agents.models
import django.db.models.deletion
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        migrations.swappable_dependency(settings.KNOX_TOKEN_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='AgentIdentity',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('name', models.CharField(max_length=255)),
                ('version', models.CharField(blank=True, max_length=100)),
                ('dependencies', models.JSONField(default=list, help_text='[{package, version}], as sent by the agent.')),
                ('config_file_path', models.CharField(blank=True, max_length=500)),
                ('sealed_config', models.TextField(blank=True, editable=False, help_text='Encrypted, because it may contain secrets.')),
                ('last_restarted', models.DateTimeField(blank=True, null=True)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('modified', models.DateTimeField(auto_now=True)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='agent_identities', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name_plural': 'agent identities',
                'ordering': ['name', 'id'],
            },
        ),
        migrations.CreateModel(
            name='AgentVhost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=255, unique=True)),
                ('ready', models.BooleanField(default=False, help_text='Whether the broker has the vhost and its dead-letter queue.')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('owner', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='agent_vhost', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='EventSubscription',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password_set', models.BooleanField(default=False, editable=False, help_text='Whether the broker has the password and the permissions.')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('modified', models.DateTimeField(auto_now=True)),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('object_type', models.CharField(blank=True, choices=[('call', 'Call'), ('course_account', 'Course Account'), ('importable_resources', 'Importable Resources'), ('offering_resources_sync', 'Offering Resources Sync'), ('offering_user', 'Offering User'), ('order', 'Order'), ('proposal', 'Proposal'), ('resource', 'Resource'), ('resource_api_key_rotation', 'Resource Api Key Rotation'), ('resource_end_date_change_request', 'Resource End Date Change Request'), ('resource_periodic_limits', 'Resource Periodic Limits'), ('service_account', 'Service Account'), ('service_provider_account', 'Service Provider Account'), ('service_provider_project_group', 'Service Provider Project Group'), ('user_lifecycle', 'User Lifecycle'), ('user_profile', 'User Profile'), ('user_role', 'User Role'), ('user_ssh_key', 'User Ssh Key')], help_text='An identity has one subscription for each type.', max_length=40)),
                ('description', models.CharField(blank=True, max_length=500)),
                ('observable_objects', models.JSONField(default=list, help_text='[{object_type, object_id?, offering_uuid?}]')),
                ('source_ip', models.GenericIPAddressField(blank=True, help_text="The client's address at registration.", null=True)),
                ('identity', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='event_subscriptions', to='agents.agentidentity')),
                ('next_token', models.ForeignKey(editable=False, help_text='The token that is being set as the password. The broker may have it already.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.KNOX_TOKEN_MODEL)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='event_subscriptions', to=settings.AUTH_USER_MODEL)),
                ('token', models.ForeignKey(editable=False, help_text='The token that is the password, as far as known. Empty: there is no password.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.KNOX_TOKEN_MODEL)),
            ],
            options={
                'ordering': ['-created', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Offering',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, unique=True)),
                ('name', models.CharField(max_length=150, validators=[agents.models.check_offering_name])),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('members', models.ManyToManyField(blank=True, help_text='Owners whose agents may subscribe to its events.', related_name='offerings', to=settings.AUTH_USER_MODEL)),
                ('publishers', models.ManyToManyField(blank=True, help_text='Owners who may publish its events.', related_name='published_offerings', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['name', 'uuid'],
            },
        ),
        migrations.AddField(
            model_name='agentidentity',
            name='offering',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='agent_identities', to='agents.offering'),
        ),
        migrations.CreateModel(
            name='SubscriptionQueue',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('object_type', models.CharField(choices=[('call', 'Call'), ('course_account', 'Course Account'), ('importable_resources', 'Importable Resources'), ('offering_resources_sync', 'Offering Resources Sync'), ('offering_user', 'Offering User'), ('order', 'Order'), ('proposal', 'Proposal'), ('resource', 'Resource'), ('resource_api_key_rotation', 'Resource Api Key Rotation'), ('resource_end_date_change_request', 'Resource End Date Change Request'), ('resource_periodic_limits', 'Resource Periodic Limits'), ('service_account', 'Service Account'), ('service_provider_account', 'Service Provider Account'), ('service_provider_project_group', 'Service Provider Project Group'), ('user_lifecycle', 'User Lifecycle'), ('user_profile', 'User Profile'), ('user_role', 'User Role'), ('user_ssh_key', 'User Ssh Key')], max_length=40)),
                ('vhost', models.CharField(max_length=255)),
                ('queue_name', models.CharField(max_length=255)),
                ('state', models.CharField(choices=[('creating', 'being made'), ('ready', 'ready')], default='creating', max_length=10)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('offering', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='subscription_queues', to='agents.offering')),
                ('subscription', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='queues', to='agents.eventsubscription')),
            ],
            options={
                'ordering': ['-created', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Sweep',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('orphans', 'queues that no registration stands for'), ('stale', 'subscriptions whose owner has no live token')], max_length=10)),
                ('at', models.DateTimeField(help_text='The start.')),
                ('seen', models.PositiveIntegerField(default=0, help_text="Queues in the agents' vhosts on the broker.")),
                ('found', models.PositiveIntegerField(default=0, help_text='Queues to delete.')),
                ('deleted', models.PositiveIntegerField(default=0, help_text='Deleted queues.')),
                ('kept', models.PositiveIntegerField(default=0, help_text='Orphans in use, which were kept.')),
                ('repaired', models.PositiveIntegerField(default=0, help_text='Queues that were declared again.')),
                ('subscriptions', models.PositiveIntegerField(default=0, help_text='Removed stale subscriptions and consumers.')),
                ('tokens', models.PositiveIntegerField(default=0, help_text='Removed expired tokens.')),
                ('brake_held', models.BooleanField(default=False)),
                ('errors', models.JSONField(default=list, help_text='Sentences.')),
                ('seconds', models.FloatField(default=0)),
            ],
            options={
                'ordering': ['-at', '-id'],
                'indexes': [models.Index(fields=['kind', '-at'], name='agents_swee_kind_5bc4b2_idx')],
            },
        ),
        migrations.CreateModel(
            name='Consumer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password_set', models.BooleanField(default=False, editable=False, help_text='Whether the broker has the password and the permissions.')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('modified', models.DateTimeField(auto_now=True)),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('object_types', models.JSONField(default=list, help_text='The types of its events. Empty: all types.')),
                ('rmq_username', models.CharField(default=agents.models._hex, editable=False, max_length=32, unique=True)),
                ('vhost', models.CharField(max_length=255)),
                ('queue_name', models.CharField(max_length=255)),
                ('state', models.CharField(choices=[('creating', 'being made'), ('ready', 'ready')], default='creating', max_length=10)),
                ('identity', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='consumer', to='agents.agentidentity')),
                ('next_token', models.ForeignKey(editable=False, help_text='The token that is being set as the password. The broker may have it already.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.KNOX_TOKEN_MODEL)),
                ('token', models.ForeignKey(editable=False, help_text='The token that is the password, as far as known. Empty: there is no password.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.KNOX_TOKEN_MODEL)),
            ],
            options={
                'ordering': ['-created', '-id'],
                'constraints': [models.UniqueConstraint(fields=('vhost', 'queue_name'), name='one_consumer_of_a_queue')],
            },
        ),
        migrations.AddConstraint(
            model_name='eventsubscription',
            constraint=models.UniqueConstraint(fields=('identity', 'object_type'), name='one_subscription_of_a_type_for_an_agent'),
        ),
        migrations.AddConstraint(
            model_name='agentidentity',
            constraint=models.UniqueConstraint(fields=('owner', 'offering', 'name'), name='one_identity_of_a_name_for_an_offering'),
        ),
        migrations.AddIndex(
            model_name='subscriptionqueue',
            index=models.Index(fields=['offering', 'object_type'], name='agents_subs_offerin_140337_idx'),
        ),
        migrations.AddConstraint(
            model_name='subscriptionqueue',
            constraint=models.UniqueConstraint(fields=('subscription', 'offering', 'object_type'), name='one_queue_for_subscription_offering_and_type'),
        ),
        migrations.AddConstraint(
            model_name='subscriptionqueue',
            constraint=models.UniqueConstraint(fields=('vhost', 'queue_name'), name='one_registration_of_a_queue'),
        ),
    ]
