"""The files of the page at `/`, which is told nothing but by the server's own paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {"/" if path.name == "index.html" else f"/page/{path.name}": path
         for path in sorted(Path(__file__).with_name("page").iterdir()) if path.suffix in KINDS}
# Answers of a model are shown there: nothing is fetched from elsewhere, and no script runs but those of the files.
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def page_routes() -> list[Route]:
    """The routes of the page's files."""
    return [Route(at, _sender(path)) for at, path in FILES.items()]


def _sender(path: Path) -> Callable[[Request], Awaitable[Response]]:
    body, kind = path.read_bytes(), KINDS[path.suffix]

    async def send(request: Request) -> Response:
        return Response(body, media_type=f"{kind}; charset=utf-8", headers={
            "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache"})

    return send
