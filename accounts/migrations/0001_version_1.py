import django.db.models.deletion
import django.db.models.functions.text
import django.utils.timezone
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('auth', '0012_alter_user_first_name_max_length'),
        ('contenttypes', '0002_remove_content_type_name'),
    ]

    operations = [
        migrations.CreateModel(
            name='Owner',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('password', models.CharField(max_length=128, verbose_name='password')),
                ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                ('is_superuser', models.BooleanField(default=False, help_text='Designates that this user has all permissions without explicitly assigning them.', verbose_name='superuser status')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('email', models.EmailField(help_text='The owner signs in with this address. Lower case.', max_length=254, unique=True, verbose_name='e-mail address')),
                ('full_name', models.CharField(blank=True, max_length=200)),
                ('vouched', models.BooleanField(default=False, help_text='Whether this owner may use the broker.')),
                ('is_staff', models.BooleanField(default=False, help_text='Whether this owner runs the installation.', verbose_name='operator')),
                ('is_active', models.BooleanField(default=True, help_text='Untick this instead of deleting the owner.', verbose_name='active')),
                ('date_joined', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('vouch_requested_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('vouch_request', models.CharField(blank=True, help_text="Why, in the owner's words.", max_length=500)),
                ('time_zone', models.CharField(default='UTC', help_text='A time zone such as Europe/Berlin.', max_length=64)),
                ('quiet_from', models.TimeField(blank=True, help_text="In the owner's time zone; empty: no quiet hours.", null=True)),
                ('quiet_until', models.TimeField(blank=True, help_text="In the owner's time zone.", null=True)),
                ('weekly_summary', models.BooleanField(default=True, help_text='Whether a summary is sent every week.')),
                ('weekly_summary_at', models.DateTimeField(editable=False, help_text='When the last summary was written.', null=True)),
                ('groups', models.ManyToManyField(blank=True, help_text='The groups this user belongs to. A user will get all permissions granted to each of their groups.', related_name='user_set', related_query_name='user', to='auth.group', verbose_name='groups')),
                ('user_permissions', models.ManyToManyField(blank=True, help_text='Specific permissions for this user.', related_name='user_set', related_query_name='user', to='auth.permission', verbose_name='user permissions')),
            ],
            options={
                'ordering': ['email'],
            },
        ),
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('object_pk', models.CharField(db_index=True, max_length=255, verbose_name='object pk')),
                ('object_id', models.BigIntegerField(blank=True, db_index=True, null=True, verbose_name='object id')),
                ('object_repr', models.TextField(verbose_name='object representation')),
                ('serialized_data', models.JSONField(null=True)),
                ('action', models.PositiveSmallIntegerField(choices=[(0, 'create'), (1, 'update'), (2, 'delete'), (3, 'access')], db_index=True, verbose_name='action')),
                ('changes_text', models.TextField(blank=True, verbose_name='change message')),
                ('changes', models.JSONField(null=True, verbose_name='change message')),
                ('cid', models.CharField(blank=True, db_index=True, max_length=255, null=True, verbose_name='Correlation ID')),
                ('remote_addr', models.GenericIPAddressField(blank=True, null=True, verbose_name='remote address')),
                ('remote_port', models.PositiveIntegerField(blank=True, null=True, verbose_name='remote port')),
                ('timestamp', models.DateTimeField(db_index=True, default=django.utils.timezone.now, verbose_name='timestamp')),
                ('additional_data', models.JSONField(blank=True, null=True, verbose_name='additional data')),
                ('actor_email', models.CharField(blank=True, max_length=254, null=True, verbose_name='actor email')),
                ('deed', models.CharField(db_index=True, help_text='The action, in words.', max_length=60)),
                ('outcome', models.CharField(choices=[('done', 'done'), ('unknown', 'unknown'), ('not-done', 'not done')], default='done', help_text='Unknown: the broker did not answer, so the action may be done.', max_length=10)),
                ('actor', models.ForeignKey(blank=True, db_constraint=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('content_type', models.ForeignKey(help_text='Empty: the action was not about one thing.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='contenttypes.contenttype', verbose_name='kind of thing')),
            ],
            options={
                'verbose_name': 'entry of the audit trail',
                'verbose_name_plural': 'audit trail',
                'ordering': ['-timestamp', '-id'],
            },
        ),
        migrations.CreateModel(
            name='AuthToken',
            fields=[
                ('digest', models.CharField(max_length=128, primary_key=True, serialize=False)),
                ('token_key', models.CharField(db_index=True, max_length=25)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('expiry', models.DateTimeField(blank=True, null=True)),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('name', models.CharField(blank=True, help_text="What the token is for, in its owner's words.", max_length=100)),
                ('last_used', models.DateTimeField(blank=True, editable=False, null=True)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='auth_token_set', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-created'],
            },
        ),
        migrations.CreateModel(
            name='PulseUser',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('username', models.CharField(help_text='The name of the account on the broker.', max_length=100, unique=True)),
                ('warn_length', models.PositiveIntegerField(blank=True, help_text="Warning threshold of its queues, in messages; empty: the policy's.", null=True)),
                ('max_length', models.PositiveIntegerField(blank=True, help_text="Deletion limit of its queues, in messages; empty: the policy's.", null=True)),
                ('ready', models.BooleanField(default=False, editable=False, help_text='Whether the broker has the account. False while it is being created.')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('removing_since', models.DateTimeField(editable=False, help_text='When its removal began. An interrupted removal is resumed.', null=True)),
                ('owners', models.ManyToManyField(related_name='pulse_users', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['username'],
            },
        ),
        migrations.CreateModel(
            name='NotificationAddress',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uuid', models.UUIDField(default=uuid.uuid4, editable=False, unique=True)),
                ('email', models.EmailField(max_length=254, verbose_name='e-mail address')),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('confirmed_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('added_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('pulse_user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='notification_addresses', to='accounts.pulseuser')),
            ],
            options={
                'verbose_name_plural': 'notification addresses',
                'ordering': ['email'],
            },
        ),
        migrations.CreateModel(
            name='SignInLink',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('digest', models.CharField(max_length=64, unique=True)),
                ('expires_at', models.DateTimeField()),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
        ),
        migrations.CreateModel(
            name='Vouching',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('vouched', models.BooleanField()),
                ('reason', models.CharField(blank=True, max_length=300)),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('by', models.ForeignKey(help_text='Empty: by a rule, which the reason names.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='vouchings', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-at', '-id'],
            },
        ),
        migrations.AddConstraint(
            model_name='owner',
            constraint=models.CheckConstraint(condition=models.Q(('email', django.db.models.functions.text.Lower('email'))), name='owner_email_is_lower_case'),
        ),
        migrations.AddConstraint(
            model_name='notificationaddress',
            constraint=models.UniqueConstraint(fields=('pulse_user', 'email'), name='one_address_once_for_an_account'),
        ),
    ]
