"""The files of the fleet's page: one HTML file with its style and script, and uPlot, all from the router.

They hold no data and need no key, since a browser cannot send one with an address that a person types. What
they show comes from paths that do. The policy allows the page's own style and script by their hashes, and
nothing from elsewhere; all that engines report is put in as text.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from baton.router.operator.admin import Reply

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/page/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
PATHS = frozenset(_FILES)


@cache
def file_at(path: str) -> Reply:
    """`path` is one of PATHS."""
    name, kind = _FILES[path]
    content = (files("baton.router.operator") / "page_files" / name).read_bytes()
    headers = {
        "content-type": kind,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    if path == "/":
        headers["content-security-policy"] = _policy(content.decode())
    return Reply(200, headers, content)


def _policy(page: str) -> str:
    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'self'; script-src 'self' {hashes('script')}; style-src 'self' {hashes('style')}; "
        "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
