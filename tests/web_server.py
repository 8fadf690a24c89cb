"""A web server on loopback that misbehaves when told to."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebServer:
    """Serves files by name, with an index of each folder.

    Attributes:
        files: content by path, without a slash in front.
        faults: what goes wrong with the next requests of a path: ``"cut"`` closes the connection after 60 % of the
            body, ``"500"`` and the like are that status, ``"short"`` and ``"long"`` are a body of another length. One
            that ends in ``"!"`` stays.
        ranges: whether parts of a file are given.
        md5: sums to send instead of the right ones, by path; none is sent by default.
        requests: method, path and range of each request.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.ranges = files, True
        self.faults: dict[str, list[str]] = {}
        self.md5: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def gets(self, path: str) -> int:
        """How often a file, or a range of it, was asked for."""
        return sum(method == "GET" and asked == path for method, asked, _ in self.requests)

    def fault(self, path: str) -> str:
        faults = self.faults.get(path, [])
        return "" if not faults else faults[0][:-1] if faults[0].endswith("!") else faults.pop(0)

    def index(self, folder: str) -> bytes:
        prefix = f"{folder}/" if folder else ""
        below = [path[len(prefix) :].partition("/") for path in self.files if path.startswith(prefix)]
        links = sorted({name + slash for name, slash, _ in below})
        return "".join(f'<a href="{link}">{link}</a>\n' for link in links).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, *, head: bool) -> None:
                path = self.path.strip("/")
                server.requests.append((self.command, path, self.headers.get("Range", "")))
                fault = "" if head else server.fault(path)
                if fault.isdigit():
                    return self.send(int(fault), b"", head=head)
                if path not in server.files:
                    index = server.index(path)
                    return self.send(200 if index else 404, index, {"Content-Type": "text/html"}, head=head)
                content = server.files[path]
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Content-Type": "application/octet-stream"}
                if path in server.md5:
                    headers["Content-MD5"] = base64.b64encode(server.md5[path]).decode()
                status = 200
                if server.ranges and (limits := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
                    first, last = int(limits[1]), int(limits[2])
                    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                    content, status = content[first : last + 1], 206
                content = content[:-1] if fault == "short" else content + b"x" if fault == "long" else content
                return self.send(status, content, headers, head=head, cut=fault == "cut")

            def send(
                self, status: int, body: bytes, headers: Any = (), *, head: bool = False, cut: bool = False
            ) -> None:
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not head:
                    self.wfile.write(body[: len(body) * 6 // 10] if cut else body)
                self.close_connection = self.close_connection or cut

        return Handler
