"""The viewer's server, for one reader, on the loopback interface.

It answers GET and HEAD for the page, api/index, api/trace?run=NUMBER&id=NAME and api/search?text=TEXT. All have a
random prefix, which other accounts of the machine do not know. Names in a request are looked up among the runs that
were read; none becomes a path. A Host that is not this machine is refused, so that no other web page can read a run by
DNS rebinding.
"""

import hashlib
import hmac
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

from unmask.view.index import json_text, runs_index
from unmask.view.page import PAGE, block, template
from unmask.view.sources import find_runs

HOST = "127.0.0.1"
# Any port: a tunnel may start at another one.
HERE = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
PLAIN = "text/plain; charset=utf-8"
HEADERS = {
    # The page's own policy allows its script and style by hash.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Viewer(ThreadingHTTPServer):
    """Serves runs until it is shut down. Port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0, page: Path = PAGE) -> None:
        self.paths, self.runs = paths, {str(number): run for number, run in enumerate(find_runs(paths))}
        self.page, self.lock, self.index, self.tag = template(page), threading.Lock(), "", ""
        self.root = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise ValueError(f"port {port} cannot be used ({error.strerror}); choose another --port") from None
        self.fresh_index()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}{self.root}"

    def fresh_index(self) -> tuple[str, str]:
        """The index as JSON, and its ETag."""
        with self.lock:
            known = {run.folder for run in self.runs.values()}
            with suppress(ValueError, OSError):  # a folder may have been removed
                for run in find_runs(self.paths, known):
                    self.runs[str(len(self.runs))] = run
                    self.index = ""
            changed = [run.refresh() for run in self.runs.values()]
            if any(changed) or not self.index:
                self.index = json_text(runs_index(list(self.runs.values()), live=True))
                self.tag = f'"{hashlib.sha256(self.index.encode()).hexdigest()[:32]}"'
            return self.index, self.tag

    def whole_page(self) -> str:
        head, middle, tail = self.page
        return head + block("unmask-data", self.fresh_index()[0]) + middle + tail

    def trace(self, run: str, name: str) -> bytes | None:
        if run not in self.runs:
            return None
        with self.lock:
            line = self.runs[run].trace(name)
        if line is None:  # the log may have grown or been rewritten
            self.fresh_index()
            with self.lock:
                line = self.runs[run].trace(name)
        return line

    def search(self, text: str) -> list[tuple[int, str]]:
        """The number of the run and the name of every group with a completion that contains the text."""
        with self.lock:
            return [(int(number), name) for number, run in self.runs.items() for name in run.search(text)]

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that is closed during a response is not an error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    server: Viewer
    server_version, sys_version = "unmask", ""
    error_content_type, error_message_format = PLAIN, "%(code)d %(message)s\n"
    timeout = 30  # seconds that a connection may be silent

    def do_GET(self) -> None:
        if not HERE.fullmatch(self.headers.get("Host", "")):
            self._respond(HTTPStatus.FORBIDDEN, b"This server answers to this machine only.\n")
            return
        path, _, query = self.path.partition("?")
        root, name = path[: len(self.server.root)], path[len(self.server.root) :]
        if not hmac.compare_digest(root.encode(), self.server.root.encode()):
            self._respond(HTTPStatus.FORBIDDEN, b"Use the whole address that `unmask view` printed.\n")
        elif name == "":
            self._respond(HTTPStatus.OK, self.server.whole_page().encode(), "text/html; charset=utf-8")
        elif name == "api/index":
            self._index()
        elif name == "api/trace":
            self._trace(query)
        elif name == "api/search":
            groups = self.server.search(_fields(query).get("text", [""])[0])
            self._respond(HTTPStatus.OK, json_text(groups).encode(), "application/json")
        else:
            self._respond(HTTPStatus.NOT_FOUND, b"Not found.\n")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._respond(HTTPStatus.METHOD_NOT_ALLOWED, b"This server is read-only.\n", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _index(self) -> None:
        text, tag = self.server.fresh_index()
        if self.headers.get("If-None-Match") == tag:
            self._respond(HTTPStatus.NOT_MODIFIED, b"", ETag=tag)
        else:
            self._respond(HTTPStatus.OK, text.encode(), "application/json", ETag=tag)

    def _trace(self, query: str) -> None:
        fields = _fields(query)
        line = self.server.trace(fields.get("run", [""])[0], fields.get("id", [""])[0])
        if line is None:
            self._respond(HTTPStatus.NOT_FOUND, b"No such group.\n")
        else:
            self._respond(HTTPStatus.OK, line, "application/json")

    def _respond(self, status: HTTPStatus, body: bytes, kind: str = PLAIN, **more: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing on the terminal."""


def _fields(query: str) -> dict[str, list[str]]:
    try:
        return parse_qs(query, max_num_fields=4)
    except ValueError:
        return {}
