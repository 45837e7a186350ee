"""The part of the Hub that an output needs, on this machine: one dataset repo, with commits and branches.

What it holds is read from `HubServer.files` and `HubServer.commits`, never with the code under test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from werkzeug.serving import WSGIRequestHandler, make_server

REPO = "owner/name"
TOKEN = "hf_writer"
PAGE = 3
"""Entries of a listing that come at once: few, so that pages are turned."""


class HubRequest(NamedTuple):
    """One request: ``kind`` is ``info``, ``tree``, ``commit`` …; ``path`` is what it asks for."""

    kind: str
    path: str


Fault = int | str
"""A status to answer with in the place of doing it; ``lost``: done, but the answer says 500."""


@dataclass(frozen=True)
class Commit:
    """One commit: all files that it has, and what it changed."""

    message: str
    files: Mapping[str, bytes]
    added: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass
class _State:
    commits: list[Commit] = field(
        default_factory=lambda: [Commit("initial", {".gitattributes": b"*.parquet"})]
    )
    branches: dict[str, int] = field(default_factory=lambda: {"main": 0})
    objects: dict[str, bytes] = field(default_factory=dict)


class HubError(Exception):
    """An answer that is none."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubServer:
    """Serves the repo on a free port.

    ``fault`` decides on each request, ``requests`` has them all; ``ignored`` are file names in the repo's
    ``.gitignore``.
    """

    def __init__(self) -> None:
        self.requests: list[HubRequest] = []
        self.fault: Callable[[HubRequest], Fault | None] = lambda _: None
        self.ignored: frozenset[str] = frozenset()
        self._state, self._lock = _State(), threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """As after ``hf repos create``, no faults."""
        self.fault, self.ignored, self._state = lambda _: None, frozenset(), _State()
        self.requests.clear()

    @property
    def commits(self) -> list[Commit]:
        """All, the oldest first, without the one that made the repo."""
        return self._state.commits[1:]

    def files(self, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds, without the repo's own ``.gitattributes``."""
        files = self._state.commits[self._state.branches[branch]].files
        return {path: content for path, content in files.items() if path != ".gitattributes"}

    def download(self, folder: Path, prefix: str = "", branch: str = "main") -> Path:
        """A copy of everything below a prefix."""
        for path, content in self.files(branch).items():
            if path.startswith(prefix):
                target = folder / path.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        return folder

    def push(self, added: Mapping[str, bytes], deleted: Iterable[str] = (), branch: str = "main") -> None:
        """A commit by somebody else."""
        with self._lock:
            self._commit(branch, "by hand", dict(added), list(deleted))

    def make_branch(self, name: str) -> None:
        self._state.branches[name] = 0

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- answers -------------------------------------------------------------------------------------

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        raw = environ["RAW_URI"].partition("?")[0]
        query = parse_qs(environ.get("QUERY_STRING", ""))
        request, answer = self._route(environ["REQUEST_METHOD"], raw, query, body)
        self.requests.append(request)
        fault = self.fault(request)
        headers: dict[str, str] = {"Content-Type": "application/json"}
        try:
            if isinstance(fault, int):
                raise HubError(fault, "made up")
            if request.kind != "lfs-put" and environ.get("HTTP_AUTHORIZATION") != f"Bearer {TOKEN}":
                raise HubError(401, "Invalid username or password.")
            with self._lock:
                status, found = answer(headers)
            if fault == "lost":
                raise HubError(500, "made up")
        except HubError as error:
            status, found = error.status, b"<html>not JSON: %d</html>" % error.status
            headers |= {"X-Error-Message": error.message, "X-Error-Code": error.code}
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        start_response(f"{status} said", [*headers.items(), ("Content-Length", str(len(content)))])
        return [content]

    def _route(
        self, verb: str, raw: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[HubRequest, Callable[[dict[str, str]], tuple[int, Any]]]:
        parts = [unquote(part) for part in raw.strip("/").split("/")]
        if raw == "/api/validate-yaml":
            return HubRequest("validate-yaml", ""), lambda _: (200, {"errors": [], "warnings": []})
        if parts[0] == "lfs":
            return HubRequest("lfs-put" if verb == "PUT" else "lfs-get", parts[1]), (
                lambda _: self._lfs_object(verb, parts[1], body)
            )
        if raw == f"/datasets/{REPO}.git/info/lfs/objects/batch":
            return HubRequest("lfs-batch", ""), lambda _: (200, self._lfs_batch(json.loads(body)))
        if parts[:2] == ["datasets", "owner"]:
            revision, path = parts[4], "/".join(parts[5:])
            return HubRequest("resolve", path), lambda headers: self._resolve(revision, path, headers)
        assert parts[:2] == ["api", "datasets"], raw
        kind = parts[4] if len(parts) > 4 else "info"
        revision = parts[5] if len(parts) > 5 else "main"
        path = "/".join(parts[6:])
        answers: dict[str, Callable[[dict[str, str]], tuple[int, Any]]] = {
            "info": lambda _: (200, self._info(revision)),
            "revision": lambda _: (200, self._info(revision)),
            "tree": lambda headers: (200, self._tree(revision, path, query, headers, raw)),
            "paths-info": lambda _: (200, self._paths_info(revision, parse_qs(body.decode())["paths"])),
            "preupload": lambda _: (200, self._preupload(revision, json.loads(body))),
            "commit": lambda _: (200, self._commit_request(revision, body)),
        }
        known = self._exists("/".join(parts[2:4]))
        kind = "info" if kind == "revision" else kind
        return HubRequest(kind, path), answers[kind] if known else _no_repo

    def _exists(self, repo: str) -> bool:
        return repo == REPO

    def _index(self, revision: str) -> int:
        """The commit of a branch or a hash."""
        hashes = {_sha(index): index for index in range(len(self._state.commits))}
        known = hashes | self._state.branches
        if revision not in known:
            raise HubError(404, "Revision Not Found", "RevisionNotFound")
        return known[revision]

    def _info(self, revision: str) -> dict[str, Any]:
        return {"id": REPO, "_id": "1", "sha": _sha(self._index(revision))}

    def _files(self, revision: str) -> Mapping[str, bytes]:
        return self._state.commits[self._index(revision)].files

    def _tree(
        self, revision: str, path: str, query: dict[str, list[str]], headers: dict[str, str], raw: str
    ) -> list[dict[str, Any]]:
        assert query["recursive"] == ["false"], "folder by folder"
        files, prefix = self._files(revision), f"{path}/" if path else ""
        below = {name.removeprefix(prefix) for name in files if name.startswith(prefix)}
        if not below:
            raise HubError(404, "not there", "EntryNotFound")
        names = sorted({name.split("/")[0] for name in below})
        entries = [_entry(files, prefix + name) for name in names]
        start = int(query.get("cursor", ["0"])[0])
        if start + PAGE < len(entries):
            headers["Link"] = f'<{self.url}{raw}?recursive=false&cursor={start + PAGE}>; rel="next"'
        return entries[start : start + PAGE]

    def _paths_info(self, revision: str, paths: list[str]) -> list[dict[str, Any]]:
        files = self._files(revision)
        return [_entry(files, path) for path in paths if path in files]

    def _resolve(self, revision: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        files = self._files(revision)
        if path not in files:
            raise HubError(404, "not there", "EntryNotFound")
        if _is_lfs(path):
            headers["Location"] = f"{self.url}/lfs/{hashlib.sha256(files[path]).hexdigest()}"
            self._state.objects[hashlib.sha256(files[path]).hexdigest()] = files[path]
            return 302, b""
        return 200, files[path]

    # --- writing -------------------------------------------------------------------------------------

    def _preupload(self, revision: str, asked: dict[str, Any]) -> dict[str, Any]:
        files = self._files(revision)

        def mode(path: str) -> dict[str, Any]:
            oid = _oid(path, files[path]) if path in files else None
            upload_mode = "lfs" if _is_lfs(path) else "regular"
            is_ignored = path.rpartition("/")[2] in self.ignored
            return {"path": path, "uploadMode": upload_mode, "shouldIgnore": is_ignored, "oid": oid}

        return {"files": [mode(file["path"]) for file in asked["files"]]}

    def _lfs_batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        def action(entry: dict[str, Any]) -> dict[str, Any]:
            is_there = entry["oid"] in self._state.objects
            upload = {"upload": {"href": f"{self.url}/lfs/{entry['oid']}", "header": {}}}
            return entry if is_there else entry | {"actions": upload}

        return {"transfer": "basic", "objects": [action(entry) for entry in asked["objects"]]}

    def _lfs_object(self, verb: str, oid: str, body: bytes) -> tuple[int, Any]:
        if verb == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self._state.objects[oid] = body
            return 200, b""
        return 200, self._state.objects[oid]

    def _commit_request(self, branch: str, body: bytes) -> dict[str, Any]:
        header, *operations = (json.loads(line) for line in body.splitlines())
        head = self._index(branch)
        parent = header["value"].get("parentCommit")
        if parent is not None and parent != _sha(head):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        added = dict(self._added(operations))
        deleted = [each["value"]["path"] for each in operations if each["key"] == "deletedFile"]
        if gone := [path for path in deleted if path not in self._files(branch)]:
            raise HubError(404, f"A file with this name doesn't exist: {gone}", "EntryNotFound")
        self._commit(branch, header["value"]["summary"], added, deleted)
        sha = _sha(self._index(branch))
        return {"commitUrl": f"{self.url}/datasets/{REPO}/commit/{sha}", "commitOid": sha, "success": True}

    def _added(self, operations: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
        for each in operations:
            value = each["value"]
            if each["key"] == "file":
                yield value["path"], base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                if value["oid"] not in self._state.objects:
                    raise HubError(400, f"no such object: {value['oid']}")
                yield value["path"], self._state.objects[value["oid"]]

    def _commit(self, branch: str, message: str, added: dict[str, bytes], deleted: list[str]) -> None:
        before = self._state.commits[self._state.branches[branch]].files
        files = {path: content for path, content in before.items() if path not in deleted} | added
        self._state.commits.append(Commit(message, files, tuple(sorted(added)), tuple(sorted(deleted))))
        self._state.branches[branch] = len(self._state.commits) - 1


def _no_repo(_: dict[str, str]) -> tuple[int, Any]:
    raise HubError(404, "Repository not found", "RepoNotFound")


def _sha(index: int) -> str:
    return hashlib.sha1(b"commit %d" % index).hexdigest()


def _is_lfs(path: str) -> bool:
    return path.endswith(".parquet")


def _oid(path: str, content: bytes) -> str:
    """As the Hub compares files: of a large one its own checksum, of a small one git's."""
    if _is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(files: Mapping[str, bytes], path: str) -> dict[str, Any]:
    if path not in files:
        return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
    content = files[path]
    entry = {"type": "file", "path": path, "size": len(content), "oid": _oid(path, content)}
    if _is_lfs(path):
        entry["lfs"] = {"oid": entry["oid"], "size": len(content), "pointerSize": 134}
    return entry


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        pass
