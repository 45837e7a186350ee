import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.data.partial import (
    PartialWriter,
    Record,
    new_partial_path,
    newest_generation,
    partial_paths,
    read_record,
    scan_partials,
)
from offline_diffusion.errors import JobError


def record(row: int, *, image: bytes | None = b"picture", **result: object) -> Record:
    return Record(row, 0, "ok" if image is not None else "failed", image, {"seed": 2**64 - 1, **result})


def write(path: Path, records: list[Record]) -> list[int]:
    """Writes a partial; returns where each record ends."""
    writer = PartialWriter(path)
    ends = [slot.offset + slot.length for slot in map(writer.append, records)]
    writer.close()
    return ends


def test_it_is_an_arrow_stream_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "p.arrows"
    write(path, [record(7, image=b"\x00\x01"), record(8, image=None, error="nan")])
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all()
    assert table["row"].to_pylist() == [7, 8]
    assert table["status"].to_pylist() == ["ok", "failed"]
    assert table["image"].to_pylist() == [b"\x00\x01", None]
    assert '"seed":18446744073709551615' in table["result"][0].as_py()


def test_records_come_back_in_order_and_by_position(tmp_path: Path) -> None:
    records = [record(n, image=bytes([n]) * n, note="ünï ☃") for n in range(5)]
    path = tmp_path / "p.arrows"
    write(path, records)
    found = list(scan_partials([path]))
    assert [r for _, r in found] == records
    assert [read_record(slot) for slot, _ in reversed(found)] == records[::-1]


def test_a_tear_at_any_byte_costs_the_last_record_only(tmp_path: Path) -> None:
    path, torn = tmp_path / "p.arrows", tmp_path / "t.arrows"
    records = [record(1), record(2, image=b"x" * 100)]
    ends = write(path, records)
    data = path.read_bytes()
    assert ends[1] == len(data)
    for length in range(len(data)):
        torn.write_bytes(data[:length])
        whole = [r for _, r in scan_partials([torn])]
        assert whole == records[: sum(end <= length for end in ends)], length


def test_zeros_after_any_byte_cost_the_last_record_only(tmp_path: Path) -> None:
    path, torn = tmp_path / "p.arrows", tmp_path / "t.arrows"
    records = [record(1), record(2, image=b"xyz" * 30)]
    ends = write(path, records)
    data = path.read_bytes()
    for length in range(ends[0], len(data)):
        torn.write_bytes(data[:length] + bytes(len(data) - length))
        found = [r for _, r in scan_partials([torn])]
        # Where the record ends in zeros itself (padding), nothing is lost.
        assert found == records[: 2 if not data[length:].strip(b"\0") else 1], length


@given(st.data())
def test_a_flipped_byte_is_never_taken_for_an_image(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = folder / "p.arrows"
    records = [record(1), record(2, image=b"abc" * 10), record(3)]
    write(path, records)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    for _, found in scan_partials([path]):
        assert found in records


def test_a_record_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.arrows"
    writer = PartialWriter(path)
    slot = writer.append(record(1, image=b"picture" * 10))
    writer.close()
    content = path.read_bytes()
    at = content.index(b"picture")
    path.write_bytes(content[:at] + b"P" + content[at + 1 :])
    with pytest.raises(JobError, match=f"damaged at byte {slot.offset}"):
        read_record(slot)


def test_every_attempt_has_its_own_file_and_the_newest_sorts_last(tmp_path: Path) -> None:
    paths = []
    for generation in range(12):
        assert newest_generation(tmp_path, "shard-00004") == generation - 1
        paths.append(new_partial_path(tmp_path, "shard-00004", generation))
        write(paths[-1], [])
    write(new_partial_path(tmp_path, "shard-00040", 40), [])
    assert partial_paths(tmp_path, "shard-00004") == paths
    with pytest.raises(FileExistsError):
        PartialWriter(paths[0])


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:7]))
    path = tmp_path / "p.arrows"
    write(path, [record(1), record(2)])
    monkeypatch.undo()
    assert [r.row for _, r in scan_partials([path])] == [1, 2]
