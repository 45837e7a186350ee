"""A dataset repo on the Hub: files are read one by one and written by commits.

The token comes from where the Hub's own tools take it, ``HF_TOKEN`` or ``hf auth login``.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from urllib.parse import unquote

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    RepoFolder,
    get_session,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, hf_raise_for_status

from offline_diffusion.data.remote_folder import RemoteFolder
from offline_diffusion.data.requests_again import T
from offline_diffusion.errors import ConfigError, JobError, JobInterrupted

RATE_LIMIT_S = 2 * 3600.0
"""So long is waited for a rate limit to pass. Those on requests take minutes, those on commits an hour."""

REQUEST_TIMEOUT_S = 120.0
"""Without any sign of the Hub's; its library would wait for ever."""

MAX_MOVES = 50
"""So often may others commit between our look at the head and our commit before we give up."""

MOVED_PAUSE_S = 1.0
"""At most, before the next try."""

_MOVED = (409, 412)
_MAY_PASS = (408, 425, 429)
_NUM_READERS = 8
_DATASET = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)"
    r"(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?"
    r"(/(?P<folder>.+))?"
)

Content: TypeAlias = bytes | Path
"""Of a file to be written; a path is of one that has it."""


class HubStorage(RemoteFolder):
    """A dataset repo, or a folder in it, see `remote_folder.RemoteFolder`.

    Args:
        url: ``hf://datasets/OWNER/NAME``, after which ``@BRANCH`` and ``/FOLDER`` may follow.
        options: As there.

    Raises:
        ConfigError: The URL is of another kind.
    """

    list_interval_s: ClassVar[float] = 60.0

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        match = _DATASET.fullmatch(self.url)
        if match is None:
            raise ConfigError(
                f"{url}: not a dataset repo on the Hub", hint="hf://datasets/OWNER/NAME[@BRANCH][/FOLDER]"
            )
        self._repo, self._folder = match["repo"], match["folder"] or ""
        self._revision = unquote(match["revision"] or "main")
        self._api = HfApi()
        disable_progress_bars()

    def names(self, folder: str) -> dict[str, int]:
        return {_name(entry): entry.size for entry in self._list(folder) if isinstance(entry, RepoFile)}

    def folders(self, folder: str) -> list[str]:
        return sorted(_name(entry) for entry in self._list(folder) if isinstance(entry, RepoFolder))

    def read(self, path: str) -> bytes:
        return self._do(path, lambda: self._get(path, self._revision))

    def exists(self, path: str) -> bool:
        return self._do(path, lambda: bool(self._there([path], self._revision)))

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        def read(path: str) -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return self.read(path)
            return None

        with ThreadPoolExecutor(_NUM_READERS) as threads:
            contents = threads.map(read, paths)
            return {
                path: content for path, content in zip(paths, contents, strict=True) if content is not None
            }

    def create(self, path: str, content: bytes) -> bool:
        return self.publish({}, surplus=(), marker=(path, content), message=f"new {path}")

    def replace(self, path: str, content: bytes) -> None:
        self._commit(path, {path: content}, (), message=f"new {path}", must_be_new=False)

    def publish(
        self, files: Mapping[str, Path], *, surplus: Collection[str], marker: tuple[str, bytes], message: str
    ) -> bool:
        """Commits files and their marker, unless the marker is there; of several callers one wins.

        Args:
            files: By its place where each is here.
            surplus: Files that go by the same commit; those that are not there are no error.
            marker: Its place and content, which is unlike what anybody else would write there.
            message: Of the commit.

        Returns:
            Whether this call won.

        Raises:
            FileNotFoundError: One of ``files`` is gone from here.
            JobInterrupted: The Hub cannot be reached for too long.
            JobError: It refuses, or is to ignore one of the files.
        """
        contents: dict[str, Content] = {**files, marker[0]: marker[1]}
        return self._commit(marker[0], contents, surplus, message=message, must_be_new=True)

    def download(self, path: str, target: Path) -> None:
        def attempt() -> None:
            with self._reading(path, self._revision) as response, open(target, "wb") as file:
                for part in response.iter_bytes(1 << 20):
                    file.write(part)

        self._do(path, attempt)

    # --- reading -----------------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        return "/".join(part for part in (self._folder, path) if part)

    def _list(self, folder: str) -> list[RepoFile | RepoFolder]:
        def attempt() -> list[RepoFile | RepoFolder]:
            try:
                return list(
                    self._api.list_repo_tree(
                        self._repo, self._full(folder) or None, revision=self._revision, repo_type="dataset"
                    )
                )
            except EntryNotFoundError:
                return []

        return self._do(folder, attempt)

    def _get(self, path: str, revision: str) -> bytes:
        with self._reading(path, revision) as response:
            return bytes(response.read())

    @contextlib.contextmanager
    def _reading(self, path: str, revision: str) -> Iterator[Any]:
        """A response whose body is still to be read."""
        endpoint = self._api.endpoint
        url = hf_hub_url(
            self._repo, self._full(path), repo_type="dataset", revision=revision, endpoint=endpoint
        )
        with get_session().stream("GET", url, headers=build_hf_headers()) as response:
            try:
                hf_raise_for_status(response)
            except EntryNotFoundError:
                raise FileNotFoundError(f"{self.url}/{path}") from None
            yield response

    # --- commits -----------------------------------------------------------------------------------

    def _commit(
        self,
        path: str,
        files: Mapping[str, Content],
        surplus: Collection[str],
        *,
        message: str,
        must_be_new: bool,
    ) -> bool:
        """Writes files; where ``path``, one of them, must be new, only if it is. Whether this call did."""
        added = self._do(path, lambda: self._upload(files))

        def attempt() -> bool | None:
            head = self._head()
            there = self._there([*surplus, path], head)
            is_ours = path in there and self._get(path, head) == files[path]
            if is_ours or (must_be_new and path in there):
                return is_ours
            return self._commit_on(head, added, there.intersection(surplus), message)

        for _ in range(MAX_MOVES):
            if (won := self._do(path, attempt)) is not None:
                return won
            time.sleep(random.uniform(0.0, MOVED_PAUSE_S))
        raise JobInterrupted(
            f"{self.url}/{path}: others commit to the repo all the time",
            hint="what is finished is kept on this machine: the same command goes on",
        )

    def _head(self) -> str:
        info = self._api.dataset_info(
            self._repo, revision=self._revision, expand=["sha"], timeout=REQUEST_TIMEOUT_S
        )
        return str(info.sha)

    def _there(self, paths: Sequence[str], head: str) -> set[str]:
        """Those of some paths that a commit has."""
        full = {self._full(path): path for path in paths}
        found = self._api.get_paths_info(self._repo, list(full), revision=head, repo_type="dataset")
        return {full[entry.path] for entry in found}

    def _upload(self, files: Mapping[str, Content]) -> list[CommitOperationAdd]:
        """What takes long, before the head is looked at: the tables go up, and wait there for a commit."""
        for content in files.values():
            if isinstance(content, Path):
                content.stat()  # the library has no error of its own for a file that is gone
        added = [CommitOperationAdd(self._full(path), content) for path, content in files.items()]
        self._api.preupload_lfs_files(
            self._repo, added, repo_type="dataset", revision=self._revision, free_memory=False
        )
        ignored = [each.path_in_repo for each in added if getattr(each, "_should_ignore", False)]
        if ignored:  # the library would leave them out without a word
            raise JobError(f"{self.url}: a .gitignore in the repo names {', '.join(ignored)}")
        return added

    def _commit_on(
        self, head: str, added: Iterable[CommitOperationAdd], surplus: Iterable[str], message: str
    ) -> bool | None:
        """Commits on top of ``head``; None when that is the branch's head no more."""
        deleted = [CommitOperationDelete(self._full(path), is_folder=False) for path in surplus]
        try:
            self._api.create_commit(
                self._repo,
                [*added, *deleted],
                commit_message=message,
                repo_type="dataset",
                revision=self._revision,
                parent_commit=head,
            )
        except HfHubHTTPError as error:
            if error.response.status_code in _MOVED:
                return None
            raise
        return True

    def _do(self, path: str, request: Callable[[], T]) -> T:
        def with_timeout() -> T:
            get_session().timeout = REQUEST_TIMEOUT_S
            return request()

        return super()._do(path, with_timeout)

    # --- errors ------------------------------------------------------------------------------------

    def _is_final(self, error: Exception) -> bool:
        if isinstance(error, HfHubHTTPError):
            return 400 <= error.response.status_code < 500 and error.response.status_code not in _MAY_PASS
        if isinstance(error, json.JSONDecodeError):  # a gateway's page in the place of an answer
            return False
        ours = NotImplementedError | TypeError | AttributeError | ValueError
        return isinstance(error, OfflineModeIsEnabled | LocalTokenNotFoundError | ours)

    def _hint(self, error: Exception) -> str | None:
        token = f"HF_TOKEN (or `hf auth login`) must be a token that may write to {self._repo}"
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, RevisionNotFoundError):
            return f"create it: hf repos branch create {self._repo} {self._revision} --repo-type dataset"
        if isinstance(error, RepositoryNotFoundError) and status != 403:  # the Hub does not tell which
            return f"create it: hf repos create {self._repo} --repo-type dataset; if it is private, {token}"
        return token if status in (401, 403) or isinstance(error, LocalTokenNotFoundError) else None

    def _patience_s(self, error: Exception) -> float:
        is_limit = isinstance(error, HfHubHTTPError) and error.response.status_code == 429
        usual = super()._patience_s(error)
        return max(RATE_LIMIT_S, usual) if is_limit else usual


def _name(entry: RepoFile | RepoFolder) -> str:
    return entry.path.rpartition("/")[2]
