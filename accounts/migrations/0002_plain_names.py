"""Give columns the names of the field's terms."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_version_1")]

    operations = [migrations.RenameField("auditentry", "deed", "event")]
