"""The admin of owners, Pulse users, tokens and the audit trail."""

from accounts.admin import audit_trail, owners, pulse_users  # noqa: F401 - Django imports this package alone
