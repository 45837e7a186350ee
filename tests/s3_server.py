"""A real S3 server on this machine, moto's, behind a layer that makes requests fail on demand.

What it holds is read with boto3, never with the code under test.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote

import boto3
from botocore.config import Config
from werkzeug.serving import WSGIRequestHandler, make_server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import DomainDispatcherApplication, create_backend_app

BUCKET = "bucket"

Fault = Literal["busy", "lost", "denied"]
"""``busy``: refused, try again. ``lost``: done, but the answer says otherwise. ``denied``: not allowed."""

_ANSWERS: dict[Fault, tuple[str, str]] = {
    "busy": ("503 Slow Down", "SlowDown"),
    "lost": ("500 Internal Server Error", "InternalError"),
    "denied": ("403 Forbidden", "AccessDenied"),
}


class S3Request(NamedTuple):
    """One request: ``verb`` is ``PUT``, ``COPY``, ``LIST`` …; ``key`` has no bucket."""

    verb: str
    key: str


class S3Server:
    """Serves one bucket on a free port.

    ``fault`` decides on each request; ``requests`` has them all; ``ignores_conditions`` makes it a
    storage that does not know exclusive creation; ``answers`` replace those of faults.
    """

    def __init__(self) -> None:
        self.requests: list[S3Request] = []
        self.fault: Callable[[S3Request], Fault | None] = lambda _: None
        self.ignores_conditions = False
        self.answers: dict[Fault, tuple[str, str]] = {}
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @functools.cached_property
    def client(self) -> Any:
        """boto3's own client; any thread may use it."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}),
        )

    def reset(self) -> None:
        """An empty bucket, no faults."""
        self.fault, self.ignores_conditions, self.answers = lambda _: None, False, {}
        moto_api_backend.reset()
        self.client.create_bucket(Bucket=BUCKET)
        self.requests.clear()

    def keys(self, prefix: str) -> dict[str, int]:
        """What lies below a prefix, relative to it, with its bytes."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        found = [entry for page in pages for entry in page.get("Contents", [])]
        return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in found}

    def download(self, prefix: str, folder: Path) -> Path:
        """A copy of everything below a prefix."""
        for key in self.keys(prefix):
            target = folder / key
            target.parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(BUCKET, f"{prefix}/{key}", str(target))
        return folder

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = _request_of(environ)
        if "boto3" in environ.get("HTTP_USER_AGENT", "").lower():  # the tests' own eyes
            return self._app(environ, start_response)
        self.requests.append(request)
        fault = self.fault(request)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault is None:
            return self._app(environ, start_response)
        if fault == "lost":
            list(self._app(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code = (_ANSWERS | self.answers)[fault]
        start_response(status, [("Content-Type", "application/xml")])
        if request.verb == "HEAD":  # has no body
            return []
        return [f"<Error><Code>{code}</Code><Message>made up</Message></Error>".encode()]


def _request_of(environ: dict[str, Any]) -> S3Request:
    verb, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""))
    key = unquote(environ["PATH_INFO"]).removeprefix(f"/{BUCKET}").lstrip("/")
    if verb == "GET" and "list-type" in query:
        return S3Request("LIST", query.get("prefix", [""])[0])
    if verb == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" in environ:
        return S3Request("COPY", key)
    return S3Request(verb, key)


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        pass
