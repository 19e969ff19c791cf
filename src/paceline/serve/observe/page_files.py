"""Files of the page at `/`: read once, sent with strict headers.

The files hold no secret and need no key; what the page asks of the API needs one. All files but `/` lie under a
name made from their contents, so that a browser may keep them for good and never mixes two versions.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
START = "index.html"
VERSION_MARK = b"{version}"  # in index.html: stands for the folder that all other files are served under
GZIP_LEVEL = 6
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INLINE_SCRIPT = re.compile(rb"<script type=\"importmap\">(.*?)</script>", re.DOTALL)
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    plain: bytes
    packed: bytes  # by gzip
    headers: Mapping[str, str]

    def response(self, asked: Headers) -> Response:
        """Return the response to a request's headers; HEAD loses its body on the way."""
        if self.headers["etag"] in asked.get("if-none-match", "").replace("W/", "").split(", "):
            return Response(status_code=304, headers=self.headers)
        if "gzip" in asked.get("accept-encoding", ""):
            return Response(self.packed, headers={**self.headers, "content-encoding": "gzip"})
        return Response(self.plain, headers=self.headers)


def content_policy(html: bytes) -> str:
    """Return a page's Content-Security-Policy: its own files, its import map by hash."""
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in _INLINE_SCRIPT.findall(html)]
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def load_page() -> dict[str, PageFile]:
    """Return the page's files by path of their URL."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES and path.is_file())
    contents = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    whole = hashlib.sha256()
    for name, data in contents.items():
        whole.update(f"{name} {len(data)}\n".encode() + data)
    version = whole.hexdigest()[:16]
    html = contents.pop(START).replace(VERSION_MARK, version.encode())
    policy = content_policy(html)
    table = {"/": _file(START, html, policy, "no-cache")}
    for name, data in contents.items():
        table[f"{PREFIX}{version}/{name}"] = _file(name, data, policy, _FOR_GOOD)
    return table


def _file(name: str, data: bytes, policy: str, caching: str) -> PageFile:
    headers = {
        "content-type": TYPES[Path(name).suffix],
        "cache-control": caching,
        "content-security-policy": policy,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "vary": "accept-encoding",
        "x-frame-options": "DENY",
        "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"',
    }
    return PageFile(data, gzip.compress(data, GZIP_LEVEL, mtime=0), headers)


class PageMiddleware:
    """ASGI wrapper that answers GET and HEAD of the page's files."""

    def __init__(self, app: ASGIApp, files: Mapping[str, PageFile]) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a file of the table, or pass the request on."""
        file = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        else:
            await file.response(Headers(scope=scope))(scope, receive, send)
