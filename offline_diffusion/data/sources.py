"""From what the user names (files, folders, globs, URLs, ``-``) to the readers of a manifest."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from fsspec.implementations.local import LocalFileSystem

from offline_diffusion.data.job_file import JOB_FILE
from offline_diffusion.data.layout import IMAGES, METRICS
from offline_diffusion.data.readers.arrow import hub_dataset, saved_dataset
from offline_diffusion.data.readers.base import Reader
from offline_diffusion.data.readers.files import DataFile
from offline_diffusion.data.readers.lines import PromptFolderReader
from offline_diffusion.data.readers.remote_files import RemoteFiles
from offline_diffusion.data.readers.sniff import DATA_SUFFIXES, open_reader, suffix_of
from offline_diffusion.data.requests_again import RequestsAgain
from offline_diffusion.data.storage import file_system_of
from offline_diffusion.data.values import show
from offline_diffusion.errors import ManifestError, did_you_mean

STDIN = "-"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_HUB_DATASET = re.compile(
    r"hf://datasets/(?P<repo>[^/@:]+(/[^/@:]+)?)"
    r"(@(?P<revision>refs/(convert|pr)/[^/:]+|[^/:]+))?(:(?P<split>[^/]+))?"
)


class SourceExpander:
    """Opens sources in order; ``notes`` gets a line for each thing worth telling.

    Args:
        prompt_columns: More names of a prompt column, for telling a header from a prompt.
        notes: Where to put notes.
        requests: Makes those to what lies elsewhere.
    """

    def __init__(self, prompt_columns: tuple[str, ...], notes: list[str], requests: RequestsAgain) -> None:
        self._prompt_columns = prompt_columns
        self._notes = notes
        self._requests = requests

    def readers(self, source: str) -> Iterator[Reader]:
        """The readers of one source.

        Raises:
            ManifestError: It is not there, holds no data, or cannot be read.
        """
        if source == STDIN:
            yield self._open(_spooled_stdin(), suffix=".jsonl")
        elif (hub := _HUB_DATASET.fullmatch(source)) is not None:
            yield hub_dataset(source, hub["repo"], hub["revision"], hub["split"])
        elif _URL.match(source):
            yield from self._remote(source)
        else:
            yield from self._local(source, os.path.expanduser(source))

    def _open(self, file: DataFile, *, suffix: str | None = None) -> Reader:
        return open_reader(file, suffix=suffix, prompt_columns=self._prompt_columns)

    def _local(self, source: str, path: str) -> Iterator[Reader]:
        if os.path.isdir(path):
            yield from self._folder(source, None, path)
        elif os.path.exists(path):
            yield self._open(_local_file(source, path))
        elif glob.has_magic(path):
            matches = sorted(match for match in self._glob(source, path) if os.path.isfile(match))
            if not matches:
                raise ManifestError(f"{source}: no file matches", hint=f"the folder here is {os.getcwd()}")
            yield from self._several([_local_file(match, match) for match in matches])
        elif (folder := path.rpartition(":")[0]) and os.path.isdir(folder):
            split = path.rpartition(":")[2]
            if not _is_saved_dataset(folder):
                raise ManifestError(f"{source}: {folder} is not a dataset made by save_to_disk")
            yield saved_dataset(source, folder, split, _dataset_file)
        else:
            raise _not_found(source, path)

    def _glob(self, source: str, pattern: str) -> Iterator[str]:
        """What ``glob`` finds; below ``**`` each folder is read once, as links may form a loop."""
        parts = pattern.split("/")
        if "**" not in parts:
            yield from glob.iglob(pattern)
            return
        first = parts.index("**")
        for root in glob.iglob("/".join(parts[:first]) + "/") if first else [""]:
            for file in _walk(source, root or ".", self._notes):
                inner = os.path.relpath(file, root or ".")
                if _fits(inner.split("/"), parts[first:]):
                    yield os.path.join(root, inner)

    def _remote(self, source: str) -> Iterator[Reader]:
        fs, path = _file_system(source)
        if isinstance(fs, LocalFileSystem):
            yield from self._local(source, path)
            return
        elsewhere = RemoteFiles(fs, self._requests)
        try:
            is_folder, found = elsewhere.info(path)["type"] == "directory", [path]
        except FileNotFoundError:
            is_folder, found = False, self._remote_glob(elsewhere, path)
        if is_folder:
            yield from self._folder(source, elsewhere, path)
        elif not found:
            raise ManifestError(f"{source}: is not there", hint="check the address and your credentials")
        elif found == [path]:
            yield self._open(DataFile(source, elsewhere, path))
        else:
            yield from self._several([DataFile(elsewhere.url(match), elsewhere, match) for match in found])

    @staticmethod
    def _remote_glob(elsewhere: RemoteFiles, path: str) -> list[str]:
        try:
            return elsewhere.glob(path) if glob.has_magic(path) else []
        except FileNotFoundError:
            return []

    def _folder(self, source: str, elsewhere: RemoteFiles | None, path: str) -> Iterator[Reader]:
        if elsewhere is None and _is_saved_dataset(path):
            yield saved_dataset(source, path, None, _dataset_file)
            return
        if _is_output_folder(elsewhere, path):
            raise ManifestError(
                f"{source}: is an output folder of offdiff, not a manifest",
                hint=f"to draw the prompts of its images again name {source.rstrip('/')}/{IMAGES}",
            )
        files = _files_below(source, elsewhere, path, self._notes)
        data = [file for file in files if suffix_of(file.name) in DATA_SUFFIXES]
        prompts = [file for file in files if suffix_of(file.name) == ".txt"]
        if data:
            self._tell_left_out(source, files, data)
            yield from self._several(data)
        elif prompts:
            self._tell_left_out(source, files, prompts)
            self._notes.append(
                f"{source}: each of its {len(prompts)} .txt files is one prompt "
                f"(a prompt a line: {source.rstrip('/')}/*.txt)"
            )
            base = path.rstrip("/")
            stems = [str(PurePosixPath(file.path).relative_to(base).with_suffix("")) for file in prompts]
            yield PromptFolderReader(source, path, tuple(zip(stems, prompts, strict=True)))
        else:
            known = ", ".join([*DATA_SUFFIXES, ".txt"])
            raise ManifestError(f"{source}: holds no data files", hint=f"looked for: {known}")

    def _several(self, files: Sequence[DataFile]) -> Iterator[Reader]:
        """Readers of files that were not named one by one: an empty one is no fault, unless all are."""
        num_open = 0
        for file in files:
            if file.stamp().size == 0:
                self._notes.append(f"{file.name}: is empty and left out")
                continue
            num_open += 1
            yield self._open(file)
        if not num_open:
            raise ManifestError(f"{files[0].name}: is empty, and so are all files beside it")

    def _tell_left_out(self, source: str, files: Sequence[DataFile], used: Sequence[DataFile]) -> None:
        paths = {file.path for file in used}
        others = [PurePosixPath(file.path).name for file in files if file.path not in paths]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            self._notes.append(f"{source}: left out {', '.join(others[:3])}{more}: no data files")


def _not_found(source: str, path: str) -> ManifestError:
    folder = os.path.dirname(path) or "."
    names = os.listdir(folder) if os.path.isdir(folder) else []
    close = did_you_mean(os.path.basename(path), names)
    hint = f"did you mean {os.path.join(os.path.dirname(source), close)}?" if close else None
    return ManifestError(f"{source}: there is no such file or folder", hint=hint)


def _file_system(source: str) -> tuple[Any, str]:
    try:
        fs, path = file_system_of(source)
    except ImportError as error:
        raise ManifestError(f"{source}: cannot be opened: {error}", hint=_install_hint(source)) from None
    except Exception as error:  # each file system has errors of its own
        raise ManifestError(f"{source}: cannot be opened: {error}") from None
    return fs, path


_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
_PACKAGES |= {"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}


def _install_hint(source: str) -> str | None:
    package = _PACKAGES.get(source.partition(":")[0])
    return f"pip install {package}" if package else None


def _is_saved_dataset(folder: str) -> bool:
    path = Path(folder)
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _is_output_folder(elsewhere: RemoteFiles | None, path: str) -> bool:
    place, base = elsewhere or os.path, path.rstrip("/")
    return place.isfile(f"{base}/{JOB_FILE}") and place.isdir(f"{base}/{METRICS}")


def _dataset_file(path: str) -> DataFile:
    return DataFile(path, None, path)


def _files_below(source: str, elsewhere: RemoteFiles | None, path: str, notes: list[str]) -> list[DataFile]:
    """Every file below a folder, sorted; names that start with ``.`` or ``_`` are left out.

    Raises:
        ManifestError: A folder cannot be listed.
    """
    if elsewhere is not None:
        base = path.rstrip("/")
        found = [(os.path.relpath(file, base), file) for file in elsewhere.find(path)]
        named = [(elsewhere.url(file), inner, file) for inner, file in found]
    else:
        found = [(os.path.relpath(file, path), file) for file in _walk(source, path, notes)]
        named = [(os.path.join(source, inner), inner, file) for inner, file in found]
    visible = [
        (inner, DataFile(_printable(name), elsewhere, file))
        for name, inner, file in named
        if not any(part.startswith((".", "_")) for part in PurePosixPath(inner).parts)
    ]
    return [file for _, file in sorted(visible, key=lambda pair: pair[0])]


def _walk(source: str, path: str, notes: list[str]) -> Iterator[str]:
    """The files below a local folder, links followed; each folder is read once, so links may form a loop."""
    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True, onerror=_raise):
        folders.sort()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            notes.append(
                f"{source}: left out {_printable(os.path.relpath(folder, path))}: it is read already"
            )
            continue
        seen.add((status.st_dev, status.st_ino))
        files = (os.path.join(folder, name) for name in names)
        yield from (file for file in files if not _is_special(file))


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a glob; hidden names only where the glob names them so."""
    if not patterns:
        return not parts
    if patterns[0] == "**" and _fits(parts, patterns[1:]):
        return True
    if not parts or (parts[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    if patterns[0] == "**":
        return len(patterns) == 1 or _fits(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _fits(parts[1:], patterns[1:])


def _raise(error: OSError) -> NoReturn:
    raise ManifestError(f"{_printable(str(error.filename))}: cannot be listed: {error.strerror}")


def _is_special(path: str) -> bool:
    """Whether reading the file could take for ever: a pipe, a socket or a device."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a link to nowhere; told when it is opened
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _local_file(name: str, path: str) -> DataFile:
    """A local file; what can be read only once, such as a pipe, is copied first."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return DataFile(_printable(name), None, path)
        if not stat.S_ISFIFO(mode):
            raise ManifestError(f"{name}: is a device or a socket", hint="name a file, a folder or a pipe")
        with Path(path).open("rb") as stream:
            return _spooled(name, stream)
    except OSError as error:
        raise ManifestError(f"{name}: cannot be read: {error}") from None


def _printable(name: str) -> str:
    """A file name as text of one line: bytes that are not UTF-8 and control characters become escapes."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return show(text, limit=len(text))


def _spooled_stdin() -> DataFile:
    try:
        return _spooled(STDIN, sys.stdin.buffer)
    except OSError as error:
        raise ManifestError(f"standard input cannot be copied: {error}") from None


def _spooled(name: str, stream: Any) -> DataFile:
    """A copy of ``stream`` in a temporary file, which goes with the ``DataFile``: rows are read twice."""
    copy = tempfile.NamedTemporaryFile(prefix="offdiff-manifest-")  # noqa: SIM115  # closed with its owner
    try:
        shutil.copyfileobj(stream, copy)
        copy.flush()
    except OSError:
        with contextlib.suppress(OSError):  # closing tries to write what is left once more
            copy.close()
        raise
    return DataFile(name, None, copy.name, keep_alive=copy)
