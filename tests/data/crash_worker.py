"""Runs jobs that die; a script, because it forks before any thread is started.

``crash SCENARIO ROOT STEP`` runs a job again and again in folder ``ROOT/<n>``, dying at its n-th call to
the operating system that changes the disk, then runs it to the end, until one run needs no n-th call.
``publish KIND ROOT`` does so at every such call of one publication: KIND is ``first`` or ``again``.
``zombie KIND ROOT`` freezes a process before each such call instead, lets another take the shard over and
publish it, twice, and then the frozen one go on.
``race KIND ROOT ROUNDS`` opens folders by several processes at once: KIND is ``open`` or ``change``.
``storm ROOT KILLS`` runs one job in ``ROOT/out`` and kills it at random moments, then lets it end.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  (imported once here, not in every child)
import pyarrow.parquet as pq
from output_fakes import (
    all_images,
    make_fault,
    make_output,
    make_row,
    make_rows,
    open_ledger,
    rows_of,
    run_job,
)

from offline_diffusion.data import tables
from offline_diffusion.data.adoption import published_records
from offline_diffusion.data.card import write_card
from offline_diffusion.data.layout import staged_file
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.partial import partial_paths, scan_partials
from offline_diffusion.data.publication import ShardLostError
from offline_diffusion.data.quick_check import find_broken
from offline_diffusion.data.record import make_record
from offline_diffusion.data.shard_writer import ShardWriter
from offline_diffusion.data.sink import Sink

CALLS = ("write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir")
STORM_ROWS, STORM_FAULTS = 120, (7, 31)
OLD = [make_row(n, row_id=row_id, images=2) for n, row_id in enumerate("abcd")]
NEW = [make_row(n, row_id=row_id, images=2) for n, row_id in enumerate(["x", "a", "b", "d"])]


def fork(work: Callable[[], None]) -> int:
    """Runs ``work`` in a child and returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def before_call(number: int, act: Callable[[], None]) -> None:
    """Does something before this process's ``number``-th call that changes the disk."""
    counter = itertools.count()

    def wrap(real: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if changes(*args) and next(counter) == number:
                act()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name), lambda *_: True))
    os.open = wrap(os.open, lambda _, flags, *__: bool(flags & os.O_CREAT))
    builtins.open = wrap(builtins.open, lambda _, mode="r", *__: "r" not in mode)


def die_at(number: int) -> None:
    """Kills this process before its ``number``-th call that changes the disk."""
    before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fresh(out: Path) -> None:
    ledger = open_ledger(out, 5, 3)
    write_card(ledger)
    run_job(ledger, make_rows(5, images=2, faults=(1,)), failing={(4, 1): "nan"})


def before_resume(out: Path) -> None:
    """An earlier attempt left images of both shards."""
    rows = make_rows(5, images=2, faults=(1,))
    ledger = open_ledger(out, 5, 3)
    sink = Sink(ledger)
    for shard in ledger.shards:
        part = rows_of(rows, shard)
        sink.open_shard(shard, part)
    for image in all_images(rows)[1:6]:
        sink.submit(image.row // 3, image, make_output(image))
    sink.close(abandon=True)


def resume(out: Path) -> None:
    """Does again only what was not there when the first attempt stopped."""
    drawn: list[tuple[int, int]] = []
    ledger = open_ledger(out, 5, 3)
    run_job(ledger, make_rows(5, images=2, faults=(1,)), failing={(4, 1): "nan"}, drawn=drawn)
    assert set(drawn) <= {(0, 0), (4, 0), (4, 1)}, drawn


def before_retry(out: Path) -> None:
    rows = [*make_rows(3, images=2), make_fault(3)]
    run_job(open_ledger(out, 4, 4), rows, failing={(0, 1): "nan", (2, 0): "nan"})


def retry(out: Path) -> None:
    run_job(open_ledger(out, 4, 4), [*make_rows(3, images=2), make_fault(3)], retry_failed=True)


def before_change(out: Path) -> None:
    options = {"image_format": "png"}
    ledger = open_ledger(out, 4, 2, options=options)
    sink = Sink(ledger)
    for shard in ledger.shards:
        part = rows_of(OLD, shard)
        sink.open_shard(shard, part)
    for image in all_images(OLD)[:-1]:  # the first shard is published, the second begun
        sink.submit(image.row // 2, image, make_output(image))
    sink.close(abandon=True)


def change(out: Path) -> None:
    options = {"image_format": "png"}
    ledger = open_ledger(out, 4, 2, options=options, manifest={"n": 2}, allow_manifest_change=True)
    run_job(ledger, NEW)


SCENARIOS = {
    "fresh": (None, fresh),
    "resume": (before_resume, resume),
    "retry": (before_retry, retry),
    "change": (before_change, change),
}


def crash(scenario: str, root: Path, step: int) -> None:
    before, work = SCENARIOS[scenario]
    if before is not None:
        assert wait(fork(lambda: before(root / "before"))) == 0
    for number in itertools.count(0, step):
        out = root / str(number)
        if before is not None:
            shutil.copytree(root / "before", out)

        def dying(out: Path = out, number: int = number) -> None:
            die_at(number)
            work(out)

        code = wait(fork(dying))
        assert code in (0, -signal.SIGKILL), code
        assert wait(fork(lambda out=out: work(out))) == 0, number
        if code == 0:
            print(number)
            return


PUBLISHED = make_rows(6)
AGAIN = {(0, 0), (1, 0)}
ONCE_MORE = {(1, 0)}
"""Images that fail in a first and in a second publication; in a third none does."""


def publish(
    out: Path, failing: set[tuple[int, int]], *, parts: int, arm: Callable[[], None] = lambda: None
) -> list[tuple[int, int]]:
    """Makes one publication of a shard, unless there is one with as few failures.

    Returns the images that had to be drawn.

    Args:
        out: The output folder.
        failing: Images that fail.
        parts: Rows of the images in a file; so publications differ in their number of files.
        arm: Called just before the shard is published.
    """
    tables.ROW_GROUP_BYTES, tables.FILE_BYTES = 1, 3_500 * parts
    ledger = open_ledger(out, 6, 6)
    shard = ledger.shards[0]
    assert find_broken(ledger, [shard]) == {}
    number, marker = ledger.next_number(shard), ledger.marker(shard)
    drawn: list[tuple[int, int]] = []
    if marker is not None and marker.num_failed <= len(failing):
        return drawn
    options: dict[str, Any] = {"task": 0, "worker": "w", "image_format": "png"}
    writer = ShardWriter(ledger, shard, PUBLISHED, number=number, retry_failed=marker is not None, **options)
    if marker is not None:
        writer.adopt(record for _, record in published_records(out, shard))
    for image in all_images(PUBLISHED):
        key = (image.row, image.image_index)
        output = make_output(image, error_type="nan" if key in failing else None)
        if key in writer.missing:
            drawn.append(key)
            writer.append(make_record(image, output, row_hash=writer.row_hash(image.row), **options))
    arm()
    try:
        writer.publish()
    except ShardLostError:
        writer.forget()
    return drawn


def clear(out: Path) -> None:
    """Deletes what a process that died left behind."""
    ledger = Ledger(out)
    ledger.clear_leftovers(ledger.shards, ledger.leftovers())


def before_publish(kind: str, root: Path) -> set[tuple[int, int]]:
    """A folder to begin with; returns the images that fail in the publication to be disturbed."""
    if kind == "first":
        (root / "before").mkdir()
        return AGAIN
    assert wait(fork(lambda: publish(root / "before", AGAIN, parts=1))) == 0
    return ONCE_MORE


def crash_publish(kind: str, root: Path) -> None:
    failing = before_publish(kind, root)
    for number in itertools.count():
        out = root / str(number)
        shutil.copytree(root / "before", out)

        def dying(out: Path = out, number: int = number) -> None:
            publish(out, failing, parts=2, arm=lambda: die_at(number))

        def resumed(out: Path = out) -> None:
            publish(out, failing, parts=2)
            clear(out)

        code = wait(fork(dying))
        assert code in (0, -signal.SIGKILL), code
        assert wait(fork(resumed)) == 0, number
        if code == 0:
            print(number)
            return


def zombie(kind: str, root: Path) -> None:
    failing = before_publish(kind, root)
    for number in itertools.count():
        out = root / str(number)
        shutil.copytree(root / "before", out)
        is_frozen, freeze = os.pipe()
        go_on, thaw = os.pipe()

        def act(freeze: int = freeze, go_on: int = go_on, thaw: int = thaw) -> None:
            os.close(thaw)
            os.write(freeze, b"x")
            os.read(go_on, 1)  # ends when the other end is closed

        def freezing(out: Path = out, number: int = number, act: Callable[[], None] = act) -> None:
            publish(out, failing, parts=2, arm=lambda: before_call(number, act))

        def taking_over(out: Path = out) -> None:
            publish(out, failing, parts=2)
            publish(out, set(), parts=1)

        pid = fork(freezing)
        os.close(freeze)
        if not os.read(is_frozen, 1):  # it came to its end before
            assert wait(pid) == 0
            print(number)
            return
        assert wait(fork(taking_over)) == 0, number
        before = checksums(out)
        os.close(thaw)
        assert wait(pid) == 0, number
        assert checksums(out) == before, number
        os.close(is_frozen)
        os.close(go_on)


def checksums(out: Path) -> dict[str, str]:
    """Of everything published."""
    paths = [*out.glob("*/*.parquet"), *out.glob("_state/shards/*")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def race(kind: str, root: Path, rounds: int) -> None:
    """Five tasks start at the same moment; each writes a file once it has opened the folder."""
    before = root / "before"
    if kind == "change":
        assert wait(fork(lambda: before_change(before))) == 0
    for number in range(rounds):
        out = root / str(number)
        if kind == "change":
            shutil.copytree(before, out)
        start = time.time() + 0.02

        def task(out: Path = out, start: float = start) -> None:
            while time.time() < start:
                pass
            changes = {"manifest": {"n": 2}, "allow_manifest_change": True} if kind == "change" else {}
            ledger = open_ledger(out, 4, 2, options={"image_format": "png"}, **changes)
            (out / "images" / f".job-{ledger.job.job_id}-{os.getpid()}").touch()

        tasks = [fork(task) for _ in range(5)]
        assert [wait(pid) for pid in tasks] == [0] * 5, number
        job_id = Ledger(out).job.job_id
        assert len(list((out / "images").glob(f".job-{job_id}-*"))) == 5, number
        if kind == "change":
            check_change(out)


def check_change(out: Path) -> None:
    """Everything of the old job, and nothing of the new one, moved aside once."""
    assert not (out / "_state" / "change.json").exists()
    (superseded,) = (out / "_state").glob("superseded-*")
    assert Ledger(superseded).job.identity.manifest != Ledger(out).job.identity.manifest
    assert [path.name for path in (superseded / "images").glob("*.parquet")] == ["shard-00000.parquet"]
    assert [path.name for path in (superseded / "shards").glob("*.json")] == ["shard-00000.json"]
    assert len(list((superseded / "partial").glob("shard-00001.*.arrows"))) == 1
    assert not list((superseded / "images").glob(".job-*"))


def storm_job(out: Path, log: Path) -> None:
    rows = make_rows(STORM_ROWS, images=2, faults=STORM_FAULTS)
    ledger = open_ledger(out, STORM_ROWS, 8)
    with Sink(ledger, num_threads=2, max_pending=4) as sink, open(log, "a", buffering=1) as drawn:
        ledger.clear_leftovers(ledger.shards, ledger.leftovers())
        published = ledger.published()
        for shard in ledger.shards:
            if shard.index in published:
                continue
            images = all_images(rows_of(rows, shard))
            finished = sink.open_shard(shard, rows_of(rows, shard))
            for image in images:
                if (image.row, image.image_index) not in finished:
                    time.sleep(0.005)
                    drawn.write(f"{image.row} {image.image_index}\n")
                    sink.submit(shard.index, image, make_output(image))


def durable(out: Path) -> set[tuple[int, int]]:
    """Images in published shards and in partials."""
    ledger = Ledger(out)
    keys: set[tuple[int, int]] = set()
    for shard in ledger.shards if (out / "job.json").exists() else []:
        keys |= {record.key for _, record in scan_partials(partial_paths(ledger.partials, shard.stem))}
        if (marker := ledger.marker(shard)) is not None:
            path = out / "images" / f"{shard.stem}.parquet"
            staged = staged_file(ledger.publications.staged / str(marker.staged), f"images/{path.name}")
            table = pq.read_table(
                staged if staged.exists() else path, columns=["row", "image_index"]
            )  # killed before it was moved
            keys |= {(row["row"], row["image_index"]) for row in table.to_pylist()}
    return keys


def check_storm(out: Path, log: Path, seen: Path) -> None:
    """What was durable after an earlier kill is so still."""
    keys = durable(out)
    earlier = (
        {tuple(map(int, line.split())) for line in seen.read_text().splitlines()} if seen.exists() else set()
    )
    assert earlier <= keys, sorted(earlier - keys)
    seen.write_text("".join(f"{row} {index}\n" for row, index in sorted(keys)))


def storm(root: Path, kills: int) -> None:
    out, log, seen = root / "out", root / "drawn.txt", root / "seen.txt"
    moments = random.Random(os.getpid())
    killed = 0
    for _ in range(kills):
        pid = fork(lambda: storm_job(out, log))
        time.sleep(moments.uniform(0.02, 0.1))
        os.kill(pid, signal.SIGKILL)
        killed += wait(pid) == -signal.SIGKILL
        assert wait(fork(lambda: check_storm(out, log, seen))) == 0
    assert wait(fork(lambda: storm_job(out, log))) == 0
    print(killed)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "crash":
        crash(rest[0], Path(rest[1]), int(rest[2]))
    elif command == "publish":
        crash_publish(rest[0], Path(rest[1]))
    elif command == "zombie":
        zombie(rest[0], Path(rest[1]))
    elif command == "race":
        race(rest[0], Path(rest[1]), int(rest[2]))
    else:
        storm(Path(rest[0]), int(rest[1]))
