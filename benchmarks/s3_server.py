"""An object store on this machine's loopback, whose requests are counted: moto's S3 server, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication
from werkzeug.serving import WSGIRequestHandler, make_server

ACCOUNT, PARTITION = "123456789012", "aws"  # moto's
KEYS = {"key": "any-key", "secret": "any-secret"}  # it takes every one


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as real stores keep them

    def log_request(self, *_: object) -> None:
        """Says nothing."""


class S3Server:
    """A store that is there while the context lasts.

    Args:
        latency_s: by which each answer is late, in seconds.
        intercept: called with each request's environment; may return a status line and a body to answer with.

    Attributes:
        requests: method, path and range of each request, in the order of arrival.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        intercept: Callable[[dict[str, Any]], tuple[str, bytes] | None] | None = None,
    ) -> None:
        self.latency_s, self.intercept = latency_s, intercept
        self.requests: list[tuple[str, str, str]] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.reset()

    def reset(self) -> None:
        """Forgets all objects and requests, and intercepts nothing."""
        s3_backends.reset()
        self.requests, self.intercept = [], None

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec must be told to reach it."""
        return {"endpoint_url": self.endpoint_url, "client_kwargs": {"region_name": "us-east-1"}, **KEYS}

    def put(self, bucket: str, key: str, content: bytes, **fields: Any) -> None:
        """Stores an object, past the protocol: not counted, and no client has a say in the key or in moto's fields."""
        backend = s3_backends[ACCOUNT][PARTITION]
        if bucket not in backend.buckets:
            backend.create_bucket(bucket, "us-east-1")
        backend.put_object(bucket, key, content, **fields)

    def delete(self, bucket: str, key: str) -> None:
        """Removes an object, past the protocol."""
        s3_backends[ACCOUNT][PARTITION].delete_object(bucket, key)

    def gets(self) -> int:
        """How many objects, or ranges of objects, were asked for."""
        return sum(method == "GET" and is_object(path) for method, path, _ in self.requests)

    def listings(self) -> int:
        """How many listings, or pages of listings, were asked for."""
        return sum(method == "GET" and not is_object(path) for method, path, _ in self.requests)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
        if self.latency_s:
            time.sleep(self.latency_s)
        answer = self.intercept(environ) if self.intercept else None
        if answer is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        status, body = answer
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]


def is_object(path: str) -> bool:
    """Whether a path names an object, not a bucket."""
    return "/" in path.strip("/")
