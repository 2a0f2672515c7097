from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import redirect, render

from accounts.models import Invitation, PulseUser
from accounts.pages.common import OwnersRequest, page_with_forms
from accounts.pulse_users import invitations
from core.refusals import Refusal


@login_required
@page_with_forms
def invitation_page(request: OwnersRequest, uuid: UUID) -> HttpResponse:
    """Show an invitation to its invitee, and accept or decline it. Opening the link changes nothing."""
    trouble, status = "", 200
    try:
        invitation = Invitation.objects.received_by(request.user).get(uuid=uuid)
        pulse_user = invitation.pulse_user
        if "accept" in request.POST:
            invitations.accept(invitation)
            messages.success(request, f"You own {pulse_user} now. Ask the other owners for its password, or set one.")
            return redirect("pulse_user", pulse_user.username)
        if "decline" in request.POST:
            invitations.decline(invitation)
            messages.success(request, f"You declined. {invitation.inviter} gets a mail.")
            return redirect("pulse_users")
    except (Invitation.DoesNotExist, PulseUser.DoesNotExist):
        return render(request, "accounts/invitation.html", status=404)
    except Refusal as error:
        trouble, status = str(error), error.status
    return render(request, "accounts/invitation.html", {"invitation": invitation, "trouble": trouble}, status=status)
