"""Which page is at which address."""

from __future__ import annotations

from typing import Any

from gpuspawner.allocator.pages.actions import ActOnGpu, Drain, StopAny, StopMine
from gpuspawner.allocator.pages.handlers import (
    AdminPage,
    DiagnosisPage,
    GpuPage,
    LoginDone,
    Nothing,
    Static,
    UserPage,
)
from gpuspawner.allocator.pages.limits import AuditPage, ChangeLimit, LimitsPage
from gpuspawner.allocator.pages.live import Live
from gpuspawner.allocator.pages.site import HERE, Site

_ID = r"([0-9a-f-]{36})"
_HOST = r"([a-z0-9][a-z0-9-]{0,39})"
_GPU = rf"{_HOST}/([0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7])"


def page_routes(site: Site) -> list[Any]:
    """Tornado's rules, to stand after the API's: the last one takes everything."""
    prefix = site.urls.prefix
    with_site = {"site": site}
    pages = [
        (r"", UserPage),
        (rf"leases/{_ID}/stop", StopMine),
        (r"admin", AdminPage),
        (rf"admin/leases/{_ID}/stop", StopAny),
        (rf"admin/hosts/{_HOST}/(drain|undrain)", Drain),
        (rf"admin/gpus/{_GPU}", GpuPage),
        (rf"admin/gpus/{_GPU}/(retest|hold|unhold|enroll|retire)", ActOnGpu),
        (rf"admin/diagnoses/{_ID}", DiagnosisPage),
        (r"admin/limits", LimitsPage),
        (r"admin/limits/(default|user|group)/(set|clear)", ChangeLimit),
        (r"admin/audit", AuditPage),
        (r"pages/events", Live),
        (r"oauth_callback", LoginDone),
    ]
    return [
        (prefix + r"static/(.*)", Static, {"path": str(HERE / "static")}),
        *((prefix + pattern, handler, with_site) for pattern, handler in pages),
        (prefix + r".*", Nothing, with_site),
    ]
