"""A healthy decode engine whose answers are errors: `python -m lab.chaos.failing HOST PORT FILE`.

The file names the status of its answers. Empty: the engine is down.
"""

import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def make_app(file: Path) -> Starlette:
    def answer(request: Request) -> Response:
        status = int(file.read_text() or 0)
        if request.url.path == "/health":
            return Response(status_code=200 if status else 503)
        if request.method == "GET":
            return Response(status_code=404)
        headers = {"retry-after": "1"} if status == 429 else {}
        return JSONResponse({"error": {"message": "it fails", "code": status}}, status, headers)

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(make_app(Path(sys.argv[3])), host=sys.argv[1], port=int(sys.argv[2]), log_level="warning")
