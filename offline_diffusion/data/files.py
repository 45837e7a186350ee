"""Small durable file operations: a name is absent or holds a whole file, whatever dies when.

No locks and no memory maps, only plain files, renames and hard links, so that it works on NFS too.
Everything is written in a scratch folder on the same file system and renamed into place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offline_diffusion.data.process import is_running, pid_space
from offline_diffusion.errors import DiskFullError, JobError

_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_FOR_LACK_OF_LINKS = {errno.ENOENT, errno.EIO, errno.EROFS, errno.ESTALE, *_FULL}
_SCRATCH_OWNER = re.compile(r"\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}$")
_HINTS = {
    errno.ENOSPC: "free some space and run the same command: it goes on where it stopped",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command: it goes on",
    errno.EACCES: "choose a folder you may write to, or change its permissions",
    errno.EPERM: "choose a folder you may write to, or change its permissions",
    errno.EROFS: "the file system is mounted read-only; make it writable or choose another folder",
    errno.ENOTDIR: "a part of the path is a file; choose another folder",
    errno.EEXIST: "a file is in the way; choose another folder",
}


@contextlib.contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turns the operating system's errors into ``JobError``, naming ``what`` was written.

    Raises:
        DiskFullError: There is no space, or the quota is used up.
        JobError: Anything else that the system says.
    """
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else str(what)
        reason = error.strerror or str(error)
        kind = DiskFullError if error.errno in _FULL else JobError
        raise kind(f"cannot write {name}: {reason}", hint=_HINTS.get(error.errno or 0)) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, as far as they are missing; a power loss does not take them away."""
    above = [each.parent for each in (folder, *folder.parents) if each == folder or not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in above:
        with contextlib.suppress(PermissionError):  # it may be one that we may only write to
            sync_folder(each)


def scratch_path(scratch: Path, name: str) -> Path:
    """A fresh path in the scratch folder for what shall be called ``name``; it tells whose it is."""
    return scratch / f"{name}.{pid_space()}-{os.getpid()}-{secrets.token_hex(4)}"


def drop_dead_scratch(scratch: Path) -> None:
    """Deletes what ended processes of this machine left under scratch names.

    What another machine or container left stays: from here nobody can tell whether it is at work.
    """
    for name in os.listdir(scratch):
        owner = _SCRATCH_OWNER.search(name)
        if owner is None or owner[1] != pid_space() or is_running(int(owner[2])):
            continue
        delete(scratch / name)


def delete(path: Path) -> None:
    """Deletes a file or a whole folder, which may be gone already."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_scratch(scratch: Path, name: str, content: bytes, *, durable: bool = True) -> Path:
    """Writes ``content`` to a fresh scratch file and returns its path; a full disk gets its space back."""
    path = scratch_path(scratch, name)
    try:
        write_file(path, content, durable=durable)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def write_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a new file that nobody looks for yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, scratch: Path, *, durable: bool = True) -> None:
    """Makes ``path`` hold ``content`` in one step.

    Args:
        path: What is created or replaced.
        content: All of it.
        scratch: Folder for temporaries on the same file system.
        durable: Whether it must survive a power loss from now on.
    """
    os.replace(write_scratch(scratch, path.name, content, durable=durable), path)
    if durable:
        sync_folder(path.parent)


def create_file(path: Path, content: bytes, scratch: Path) -> bool:
    """Makes ``path`` hold ``content`` unless it is there already; of several callers one wins.

    Returns:
        Whether this call created it.
    """
    temporary = write_scratch(scratch, path.name, content)
    try:
        created = link_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if created:
        sync_folder(path.parent)
    return created


def link_file(source: Path, target: Path) -> bool:
    """Gives a small file that is whole a second name unless that is taken; of several callers one wins.

    The name is durable when its folder is synced.

    Returns:
        Whether this call created ``target``.

    Raises:
        FileNotFoundError: ``source`` is gone: nothing was created.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost, and then finds the name that it has made.
        return os.stat(source).st_nlink > 1
    except OSError as error:
        if error.errno in _NOT_FOR_LACK_OF_LINKS:
            raise
        return _create_without_links(target, source.read_bytes())
    return True


def _create_without_links(path: Path, content: bytes) -> bool:
    """Exclusive as a link is, but a crash can leave a torn file: readers must bear one."""
    try:
        with open(path, "xb", buffering=0) as file:
            try:
                file.write(content)
                os.fsync(file.fileno())
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True


def move_away(folder: Path, scratch: Path) -> None:
    """Deletes a folder for everybody at once: whoever still works in it finds it gone."""
    aside = scratch_path(scratch, folder.name)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
        # By its old name it is gone already; a client of NFS may know it by a handle until it is deleted.
        shutil.rmtree(aside, ignore_errors=True)


def to_json(value: Any) -> bytes:
    """JSON for our small state files, readable by people."""
    return (json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")


def read_json(path: Path) -> dict[str, Any]:
    """Reads one of our small state files.

    Raises:
        FileNotFoundError: It is not there.
        JobError: It does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise JobError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise JobError(f"{path} is damaged: it must hold a JSON object, got {type(value).__name__}")
    return value


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
