"""What every page does alike: who is looking, errors that say what to do, headers, flashes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from http import HTTPStatus
from typing import Any, ClassVar

import sqlalchemy as sa
from jupyterhub.services.auth import HubOAuthenticated, UserNotAllowed
from tornado import web

from gpuspawner.allocator.auth import Principal
from gpuspawner.allocator.errors import ApiError
from gpuspawner.allocator.pages.site import Site
from gpuspawner.ledger.database import Deposed, LedgerUnwritable

log = logging.getLogger(__name__)

_HUB_S = 10
_FLASH = "gpuspawner-flash"


class PageError(web.HTTPError):
    """What the visitor is told instead of the page: what happened, and what to do."""

    def __init__(self, status: int, title: str, happened: str, todo: str) -> None:
        super().__init__(status)
        self.title = title
        self.happened = happened
        self.todo = todo


def not_there(what: str) -> PageError:
    """404 for a thing that the ledger does not have."""
    return PageError(
        404,
        "There is no such thing",
        f"There is no {what}.",
        "It may have been removed. Go back to the list.",
    )


class Page(HubOAuthenticated, web.RequestHandler):  # type: ignore[misc]  # no types upstream
    """A page for browsers. Programs use the API."""

    needs: ClassVar[str] = "login"  # or "view", "manage"
    logs_in: ClassVar[bool] = False

    def initialize(self, site: Site) -> None:
        self.site = site
        self.hub_auth = site.auth
        self.nonce = secrets.token_urlsafe(16)

    # ------------------------------------------------------------------ headers

    def set_default_headers(self) -> None:
        """Nothing is kept; only our own script runs. Every user's server has the same origin as
        these pages, so ``'self'`` would let any of them supply the script."""
        site: Site | None = getattr(self, "site", None)
        origin = f" {site.hub_origin}" if site is not None and site.hub_origin else ""
        nonce = getattr(self, "nonce", "")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'self'{origin}; "
            f"img-src 'self' data:{origin}; font-src 'self'{origin}; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        )

    # ------------------------------------------------------------------ who is looking

    def get_current_user(self) -> dict[str, Any] | None:
        """Whom ``prepare`` has found. Upstream's would hold up the whole allocator meanwhile."""
        user: dict[str, Any] | None = getattr(self, "_hub_auth_user_cache", None)
        return user

    def check_xsrf_cookie(self) -> None:
        """As JupyterHub does it: the token belongs to the login."""
        if self.site.auth is None:
            raise _no_hub()
        super().check_xsrf_cookie()

    async def prepare(self) -> None:
        """Find out who is looking, and whether she may."""
        self.set_default_headers()
        if self.site.auth is None:
            raise _no_hub()
        self._hub_auth_user_cache = None
        user = await self._ask_hub()
        if user is not None:
            try:
                self._hub_auth_user_cache = self.current_user = self.check_hub_user(user)
            except UserNotAllowed:
                raise PageError(
                    403,
                    "This page is not open to you",
                    f"You are logged in as {user['name']}, and that account may not open the "
                    "GPU pages.",
                    "An administrator can grant it in JupyterHub's configuration (scope "
                    "access:services!service=gpu).",
                ) from None
        if self.needs == "login":
            return
        if self.current_user is not None and not self._may(self.needs):
            raise PageError(
                403,
                "This page is for the pool's admins",
                f"You are logged in as {self.current_user['name']}. This takes the scope "
                f"custom:gpu:{self.needs}, and your account does not have it.",
                "An administrator of JupyterHub can grant it, as a rule by putting you into the "
                "group gpu-admins. Log out and in again afterwards.",
            )

    async def _ask_hub(self) -> dict[str, Any] | None:
        auth = self.site.auth
        try:
            async with asyncio.timeout(_HUB_S):
                user: dict[str, Any] | None = await auth.get_user(self, sync=False)
                if user is not None and self.request.method == "POST":
                    # Whoever has lost the right a moment ago does nothing any more.
                    user = await auth.user_for_token(
                        auth.get_token(self),
                        use_cache=False,
                        session_id=auth.get_session_id(self),
                        sync=False,
                    )
                return user
        except (web.HTTPError, TimeoutError) as error:
            raise PageError(
                503,
                "JupyterHub does not answer",
                "The allocator cannot ask JupyterHub who you are. Servers and GPUs go on as they "
                "are.",
                "Load the page again in a minute. If it stays so, tell an administrator.",
            ) from error

    def _may(self, access: str) -> bool:
        visitor = Principal("", None, frozenset(self.current_user.get("scopes") or ()))
        return visitor.may_manage if access == "manage" else visitor.may_view

    @property
    def visitor(self) -> Principal:
        """Who is logged in. Nobody: on to the login, or an error where that cannot be."""
        user = self.current_user
        if user is None:
            raise _LoggedOut()
        return Principal(str(user["name"]), None, frozenset(user.get("scopes") or ()))

    @property
    def fragment(self) -> str | None:
        """The part of the page that the page's script asks for, if it is the one that asks."""
        return self.get_query_argument("fragment", None)

    # ------------------------------------------------------------------ answers

    def show(self, template: str, status: int = 200, **values: Any) -> None:
        """Send a page, or a part of one."""
        self.set_status(status)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        user = self.current_user
        html = self.site.templates.get_template(template).render(
            urls=self.site.urls,
            static_url=self.site.static_url,
            nonce=self.nonce,
            xsrf=self._xsrf(),
            user=None if user is None else str(user["name"]),
            may_view=user is not None and self._may("view"),
            may_manage=user is not None and self._may("manage"),
            flash=None if self.fragment else self._take_flash(),
            path=self.request.path,
            **values,
        )
        self.finish(html)

    def _xsrf(self) -> str:
        if self.site.auth is None:
            return ""
        token = self.xsrf_token
        return token.decode() if isinstance(token, bytes) else str(token)

    def say(self, text: str, tone: str = "ok") -> None:
        """A sentence for the next page."""
        value = json.dumps({"text": text[:700], "tone": tone})
        self.set_secure_cookie(
            _FLASH, value, expires_days=None, path=self.site.urls.prefix, httponly=True,
            samesite="Lax",
        )  # fmt: skip

    def _take_flash(self) -> dict[str, str] | None:
        if self.site.auth is None or not self.get_cookie(_FLASH):
            return None
        raw = self.get_secure_cookie(_FLASH, max_age_days=1)
        self.clear_cookie(_FLASH, path=self.site.urls.prefix)
        if raw is None:
            return None
        flash: dict[str, str] = json.loads(raw)
        return flash

    def go(self, url: str) -> None:
        """On to another page after something was done."""
        self.redirect(url, status=303)

    # ------------------------------------------------------------------ errors

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Every error is a page: what happened, and what to do."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, _LoggedOut) and self._to_login():
            return
        shown = self._explain(error, status_code)
        template = "parts/error.html" if self.fragment else "error.html"
        self.show(template, shown.status_code, error=shown)

    def _to_login(self) -> bool:
        if self.request.method != "GET" or self.fragment:
            return False
        self.redirect(self.get_login_url())
        return True

    def _explain(self, error: BaseException | None, status: int) -> PageError:
        match error:
            case PageError():
                return error
            case ApiError():
                body = error.body
                title = HTTPStatus(body.status).phrase if body.status < 500 else "It did not work"
                if body.status == 409:
                    title = "That cannot be done now"
                return PageError(
                    body.status, title, body.message, "Go back, look at the state, and try again."
                )
            case LedgerUnwritable() | Deposed() | sa.exc.SQLAlchemyError():
                log.error("page_database_error path=%s", self.request.path, exc_info=error)
                return PageError(
                    503,
                    "The allocator's database does not work",
                    "Nothing was changed. Running servers go on.",
                    "Try again in a minute. If it stays so, an administrator finds the reason in "
                    "the allocator's log.",
                )
        if status == 403 and "xsrf" in str(error).lower():
            return PageError(
                403,
                "This form has expired",
                "The form was made for another login, so nothing was done.",
                "Go back, load the page again, and send the form once more.",
            )
        if self.logs_in and isinstance(error, web.HTTPError) and error.log_message:
            # The login library's own words; they name no secrets.
            return PageError(
                status, "The login did not work", str(error.log_message)[:300], "Log in again."
            )
        if status == 400:
            return PageError(
                400,
                "The request could not be read",
                "Nothing was done.",
                "Go back, load the page again, and try once more.",
            )
        if status == 405:
            return PageError(405, "This address takes no such request", "Nothing was done.",
                             "Go back to the page that you came from.")  # fmt: skip
        return PageError(
            status,
            "Something failed in the allocator",
            "The page could not be made. Servers and GPUs are not touched by this.",
            "Try again. If it happens again, tell an administrator the time; the allocator's log "
            "has the reason.",
        )

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        """Only defects need a traceback."""
        if not isinstance(value, web.HTTPError | ApiError):
            super().log_exception(kind, value, trace)


class _LoggedOut(PageError):
    def __init__(self) -> None:
        super().__init__(
            401,
            "You are logged out",
            "Your login has ended, so nothing was done.",
            "Log in again, then come back to this page.",
        )


def _no_hub() -> PageError:
    return PageError(
        503,
        "The pages are not set up",
        "The allocator has no token for JupyterHub (service.token in its state directory), so "
        "nobody can log in here.",
        "An administrator makes one with 'gpuspawner token' and restarts the allocator.",
    )
