"""Give columns the names of the field's terms."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("queues", "0001_version_1")]

    operations = [
        migrations.RenameField("queue", "said", "notified_state"),
        migrations.RenameField("queue", "recovery_said", "recovery_notified"),
        migrations.RenameField("queue", "taken_out", "acknowledged_total"),
        migrations.RenameField("queue", "unattended_told_at", "unattended_notified_at"),
        migrations.RenameField("queue", "stalled_told_at", "stalled_notified_at"),
        migrations.RenameField("watch", "short_told_at", "short_notified_at"),
    ]
