"""URLs of sign-in, vouching, Pulse users and tokens."""

from allauth.account.views import LogoutView
from django.urls import URLPattern, URLResolver, path, register_converter
from django.urls.converters import StringConverter

from accounts.pages import invitations, owners, pulse_user_owners, pulse_users, tokens
from accounts.signing_in import codes, links, openid_connect


class PulseUserName(StringConverter):
    """The name of a Pulse user in a path. NULs don't match, because PostgreSQL can't search for them."""

    regex = r"[^/\x00]+"


register_converter(PulseUserName, "pulse_user")

OIDC = {"provider_id": codes.PROVIDER_ID}

urlpatterns: list[URLPattern | URLResolver] = [
    # Signing in
    path("signin/", codes.SignInView.as_view(), name="account_login"),
    path("signin/", codes.SignInView.as_view(), name="account_request_login_code"),
    path("signin/code/", codes.CodeView.as_view(), name="account_confirm_login_code"),
    path("signin/link/<str:token>/", links.sign_in_link, name="sign_in_link"),
    path("signin/oidc/", openid_connect.openid_connect_login, OIDC, name="openid_connect_login"),
    path("signin/oidc/callback/", openid_connect.openid_connect_callback, OIDC, name="openid_connect_callback"),
    path("signout/", LogoutView.as_view(template_name="signin/signout.html"), name="account_logout"),
    # Vouching
    path("vouching/", owners.vouching_page, name="vouching"),
    path("owners/", owners.owners_page, name="owners"),
    path("owners/<uuid:uuid>/", owners.owner_page, name="owner"),
    # Pulse users
    path("pulse-users/", pulse_users.pulse_users_page, name="pulse_users"),
    path("pulse-users/<pulse_user:username>/", pulse_users.pulse_user_page, name="pulse_user"),
    path("pulse-users/<pulse_user:username>/password/", pulse_users.pulse_user_password, name="pulse_user_password"),
    path("pulse-users/<pulse_user:username>/owners/", pulse_user_owners.pulse_user_owners, name="pulse_user_owners"),
    path(
        "pulse-users/<pulse_user:username>/owners/<uuid:uuid>/remove/",
        pulse_user_owners.pulse_user_owner_remove,
        name="pulse_user_owner_remove",
    ),
    path(
        "pulse-users/<pulse_user:username>/connections/",
        pulse_users.pulse_user_connections,
        name="pulse_user_connections",
    ),
    path(
        "pulse-users/<pulse_user:username>/addresses/",
        pulse_user_owners.pulse_user_addresses,
        name="pulse_user_addresses",
    ),
    path(
        "pulse-users/<pulse_user:username>/thresholds/", pulse_users.pulse_user_thresholds, name="pulse_user_thresholds"
    ),
    path("pulse-users/<pulse_user:username>/hold-off/", pulse_users.pulse_user_hold_off, name="pulse_user_hold_off"),
    path("pulse-users/<pulse_user:username>/archives/", pulse_users.pulse_user_archives, name="pulse_user_archives"),
    path("pulse-users/<pulse_user:username>/delete/", pulse_users.pulse_user_delete, name="pulse_user_delete"),
    path("invitations/<uuid:uuid>/", invitations.invitation_page, name="invitation"),
    path("addresses/<str:token>/", pulse_user_owners.confirm_address, name="confirm_address"),
    # Tokens
    path("tokens/", tokens.tokens_page, name="tokens"),
    path("tokens/<uuid:uuid>/revoke/", tokens.token_revoke, name="token_revoke"),
]
