"""``--allow-manifest-change``: an output folder is given to another manifest.

Everything published or staged and every partial moves to ``_state/superseded-<job id>`` first, from
where it is adopted shard by shard (``adoption``). ``_state/change.json`` says that a change was decided;
any process that finds it carries the change to its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from offline_diffusion.data.files import create_file, read_json, replace_file, sync_folder, to_json
from offline_diffusion.data.job_file import (
    JOB_FILE,
    Difference,
    JobIdentity,
    differences,
    new_job,
    read_job,
)
from offline_diffusion.data.layout import PARTIALS, SCRATCH, SHARDS, STAGED, STATE, TABLES
from offline_diffusion.data.publication import Publications
from offline_diffusion.errors import JobMismatchError

_CHANGE = f"{STATE}/change.json"
_SUPERSEDED = "superseded-"
_MOVED = ".moved"
_MAX_SHOWN = 20


def superseded_folders(out: Path) -> list[Path]:
    """What earlier manifests of an output folder left."""
    return sorted((out / STATE).glob(f"{_SUPERSEDED}*"))


def change_manifest(out: Path, identity: JobIdentity, *, allowed: bool) -> None:
    """Gives the folder to another manifest; several processes may ask for the same change.

    Raises:
        JobMismatchError: Not allowed, or more than the manifest differs; every difference is named.
    """
    old = read_job(out)
    found = differences(old.identity, identity)
    if not found:  # another process has changed it by now
        return
    if not allowed or not all(difference.changeable for difference in found):
        raise _mismatch(out, found)
    change = {"old": old.to_dict(), "new": new_job(identity).to_dict()}
    create_file(out / _CHANGE, to_json(change), out / SCRATCH)
    finish_change(out)
    if found := differences(read_job(out).identity, identity):  # another process chose a third manifest
        raise _mismatch(out, found)


def finish_change(out: Path) -> None:
    """Carries out a change that was decided, however often it was begun, by however many."""
    path = out / _CHANGE
    try:
        change = read_json(path)
    except FileNotFoundError:
        return
    old, new = change["old"], change["new"]
    if read_job(out).job_id == old["job_id"]:
        folder = out / STATE / f"{_SUPERSEDED}{new['job_id']}"
        folder.mkdir(exist_ok=True)
        replace_file(folder / JOB_FILE, to_json(old), out / SCRATCH)
        # Staged files first: without them no process of the old job can put anything into the new tables.
        for name in (STAGED, *TABLES, SHARDS, PARTIALS):
            _move_aside(out / name, folder / Path(name).name)
        Publications.of_superseded(out, folder).roll_forward()
        for changed in (folder, out / STATE, out):
            sync_folder(changed)
        replace_file(out / JOB_FILE, to_json(new), out / SCRATCH)
    path.unlink(missing_ok=True)


def _move_aside(source: Path, target: Path) -> None:
    """Moves a folder unless it has been moved.

    A folder cannot be renamed onto one that is not empty, and what moves is never empty: so a
    process that comes late cannot move what was written after the change.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(source)
        try:
            (source / _MOVED).touch()
            os.rename(source, target)
            return
        except FileNotFoundError:  # another process has just moved it: look again
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            (source / _MOVED).unlink(missing_ok=True)
            return


def _mismatch(out: Path, found: list[Difference]) -> JobMismatchError:
    lines = [f"  {difference}" for difference in found[:_MAX_SHOWN]]
    if len(found) > len(lines):
        lines.append(f"  ... and {len(found) - len(lines)} more")
    if all(difference.changeable for difference in found):
        hint = (
            "--allow-manifest-change keeps the rows whose id and content are unchanged and makes the others"
        )
    else:
        hint = "the dataset would not be of one kind: use the old values, or another --out"
    return JobMismatchError("\n".join([f"{out} belongs to another job:", *lines]), hint=hint)
