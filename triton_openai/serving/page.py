"""
The page for people at ``/`` and the description of the API at ``/docs``: static files that the package brings.

They are open without a key, because they hold nothing of this service: they fetch it with their reader's key.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files

from aiohttp import web

from triton_openai.access.keys import ROUTE_GROUPS

#: Scripts that an answer's first formula loads: what shows it, and Temml as it was published.
LATER = ("math", "temml")
_SCRIPTS = ("page", "branches", "chat", "chats", "code", "docs", "common", "highlight", "markdown", "speech", *LATER)
#: By path: the file, and its type.
FILES = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
    "/page/style.css": ("style.css", "text/css"),
    "/page/math.css": ("math.css", "text/css"),
}
#: Nothing comes from elsewhere, nothing runs that is not in the files, and no other site shows them in a frame. What is
#: played, the page has made itself.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: web.Application) -> None:
    """Add the page's files to *app*."""
    folder = files("triton_openai.page")
    for path, (name, kind) in FILES.items():
        resource = app.router.add_resource(path)
        send = partial(_send, (folder / name).read_bytes(), kind)
        for method in ("GET", "HEAD"):
            app[ROUTE_GROUPS][resource.add_route(method, send)] = "page"


async def _send(body: bytes, kind: str, _: web.Request) -> web.Response:
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
