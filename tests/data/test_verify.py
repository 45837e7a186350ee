import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from output_fakes import make_rows, open_ledger, run_job

from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.publication import Publications
from offline_diffusion.data.verify import redo_hint, verify, verify_shards
from offline_diffusion.errors import JobError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    run_job(open_ledger(out, 6, 3), make_rows(6, images=2, faults=(4,)), failing={(1, 1): "nan"})
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Changes a table and makes its marker say so: only the contents can tell."""
    pq.write_table(change(pq.read_table(path)), path)
    forget(path.parent.parent, path)


def forget(out: Path, path: Path) -> None:
    for marker in (out / "_state" / "shards").iterdir():
        values = json.loads(marker.read_text())
        for file in values["files"]:
            if out / file["path"] == path:
                num_rows = pq.read_metadata(path).num_rows
                file.update(sha256=None, num_bytes=path.stat().st_size, num_rows=num_rows)
        marker.write_text(json.dumps(values))


def set_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(
        index, table.schema.field(index), pa.array(values, table.schema.field(index).type)
    )


def reasons(out: Path) -> list[str]:
    return [str(problem) for problem in verify(out, num_threads=2).problems]


def test_a_finished_folder_is_right(out: Path) -> None:
    report = verify(out, num_threads=2)
    assert report.problems == []
    assert report.ok
    assert (report.num_shards, report.num_shards_done, report.num_rows, report.num_images) == (2, 2, 6, 9)
    assert report.pending == []


def test_shards_to_come_are_no_fault(out: Path) -> None:
    for path in [out / "_state" / "shards" / "shard-00001.json", *out.glob("*/shard-00001.parquet")]:
        path.unlink()
    report = verify(out)
    assert report.ok
    assert report.pending == [1]
    assert [shard.done for shard in verify_shards(out)] == [True, False]


def test_without_its_state_a_folder_is_checked_all_the_same(out: Path) -> None:
    shutil.rmtree(out / "_state")
    report = verify(out)
    assert report.ok
    assert report.num_images == 9


def test_a_flipped_byte_is_seen(out: Path) -> None:
    path = out / "images" / "shard-00000.parquet"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert reasons(out) == ["images/shard-00000.parquet: its checksum is not that of what was published"]


def test_a_cut_file_is_seen(out: Path) -> None:
    path = out / "metrics" / "shard-00001.parquet"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    assert reasons(out) == [f"metrics/shard-00001.parquet: has {size - 10} bytes, published were {size}"]


def test_a_missing_file_is_seen(out: Path) -> None:
    (out / "failures" / "shard-00001.parquet").unlink()
    assert reasons(out) == ["failures/shard-00001.parquet: is missing"]


def test_a_stray_file_is_seen(out: Path) -> None:
    shutil.copy(out / "images" / "shard-00000.parquet", out / "images" / "shard-00002.parquet")
    (out / "images" / ".hidden").touch()
    (reason,) = reasons(out)
    assert reason.startswith("images/shard-00002.parquet: belongs to no published shard")


def test_files_without_their_marker_are_seen(out: Path) -> None:
    (out / "_state" / "shards" / "shard-00001.json").unlink()
    report = verify(out)
    assert report.pending == [1]
    assert sorted(problem.file for problem in report.problems) == [
        "failures/shard-00001.parquet",
        "images/shard-00001.parquet",
        "metrics/shard-00001.parquet",
    ]


def test_a_damaged_marker_is_seen(out: Path) -> None:
    (out / "_state" / "shards" / "shard-00000.json").write_text("{")
    assert any("shard-00000.json is damaged" in reason for reason in reasons(out))


def test_a_picture_with_other_pixels_is_seen(out: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        images = table["image"].to_pylist()
        buffer = io.BytesIO()
        PIL.Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(buffer, "PNG")
        images[1] = images[1] | {"bytes": buffer.getvalue()}
        images[2] = images[2] | {"bytes": images[2]["bytes"][:100]}
        buffer = io.BytesIO()
        PIL.Image.fromarray(np.zeros((8, 24, 3), np.uint8)).save(buffer, "PNG")
        images[3] = images[3] | {"bytes": buffer.getvalue()}
        return set_column(table, "image", images)

    rewrite(out / "images" / "shard-00000.parquet", change)
    found = reasons(out)
    assert found[0] == "images/shard-00000.parquet: row 0: image 1: its pixels are not those recorded"
    assert found[1].startswith("images/shard-00000.parquet: row 1: image 0: does not decode:")
    assert found[2] == "images/shard-00000.parquet: row 2: image 0: is 24x8, recorded is 24x16"
    assert len(found) == 3


def test_a_missing_and_a_double_image_are_seen(out: Path) -> None:
    rewrite(out / "images" / "shard-00000.parquet", lambda table: table.take([0, 1, 1, 3, 4]))
    assert reasons(out) == [
        "images/shard-00000.parquet: row 1: image 0 is missing",
        "images/shard-00000.parquet: has an image twice",
    ]


def test_another_order_is_seen(out: Path) -> None:
    rewrite(out / "images" / "shard-00000.parquet", lambda table: table.take([1, 0, 2, 3, 4]))
    assert reasons(out) == ["images/shard-00000.parquet: is not in manifest order"]


def test_a_row_that_is_missing_is_seen(out: Path) -> None:
    rewrite(out / "metrics" / "shard-00001.parquet", lambda table: table.slice(2))  # both images of row 3
    found = reasons(out)
    assert "metrics/shard-00001.parquet: row 4: row 3 is expected here" in found
    assert "images/shard-00001.parquet: row 3: image 0 is not in metrics" in found


def test_rows_missing_at_the_end_are_seen(out: Path) -> None:
    rewrite(out / "metrics" / "shard-00001.parquet", lambda table: table.slice(0, 3))
    found = reasons(out)
    assert "metrics/shard-00001.parquet: ends at row 4, not 5" in found
    assert "metrics/shard-00001.parquet: has 2 good and 1 failed, published were 4 and 1" in found


def test_an_image_left_out_of_both_tables_is_seen(out: Path) -> None:
    rewrite(out / "metrics" / "shard-00000.parquet", lambda table: table.take([0, 2, 3, 4, 5]))
    rewrite(out / "images" / "shard-00000.parquet", lambda table: table.take([0, 2, 3, 4]))
    assert reasons(out) == ["metrics/shard-00000.parquet: has 4 good and 1 failed, published were 5 and 1"]


def test_a_first_image_left_out_of_both_tables_is_seen(out: Path) -> None:
    rewrite(out / "metrics" / "shard-00000.parquet", lambda table: table.slice(1))
    rewrite(out / "images" / "shard-00000.parquet", lambda table: table.slice(1))
    assert "metrics/shard-00000.parquet: row 0: image 0 is expected, not 1" in reasons(out)


def test_other_columns_are_seen(out: Path) -> None:
    rewrite(out / "images" / "shard-00000.parquet", lambda table: table.drop_columns(["sha256"]))
    assert reasons(out) == ["images/shard-00000.parquet: has other columns than it should"]


def test_not_an_output_folder(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not an output folder"):
        verify(tmp_path)


@pytest.fixture
def unmoved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A retry of shard 0 was committed by a process that died before it moved the files."""
    out, rows = tmp_path / "unmoved", make_rows(6, images=2, faults=(4,))
    run_job(open_ledger(out, 6, 3), rows, failing={(1, 1): "nan"})
    monkeypatch.setattr(Publications, "move", lambda *_: None)
    run_job(open_ledger(out, 6, 3), rows, retry_failed=True)
    monkeypatch.undo()
    return out


def test_a_committed_shard_is_read_where_its_files_are(unmoved: Path) -> None:
    report = verify(unmoved, num_threads=2)
    assert (report.problems, report.pending, report.unmoved) == ([], [], [0, 1])
    assert not report.finished
    assert report.num_images == 10  # one more than are in the tables yet
    (staged,) = (unmoved / "_state" / "staged").glob("shard-00000.r1.*")
    (staged / "images.shard-00000.parquet").unlink()
    assert "images/shard-00000.parquet: has" in reasons(unmoved)[0]  # the old file is not the committed one


def test_the_next_run_puts_a_committed_shard_into_its_place(unmoved: Path) -> None:
    open_ledger(unmoved, 6, 3)
    report = verify(unmoved, num_threads=2)
    assert (report.problems, report.pending, report.unmoved, report.num_leftovers) == ([], [], [], 0)
    assert report.num_images == pq.read_table(unmoved / "images").num_rows == 10
    assert not (unmoved / "failures" / "shard-00000.parquet").exists()


def test_staged_leftovers_are_counted_and_no_fault(out: Path) -> None:
    folder = out / "_state" / "staged" / "shard-00000.r1.000003-0a1b2c3d"
    folder.mkdir()
    (folder / "images.shard-00000.parquet").write_bytes(b"torn")
    report = verify(out)
    assert (report.problems, report.unmoved, report.num_leftovers) == ([], [], 1)
    assert report.finished


def test_of_several_markers_the_last_one_counts(out: Path) -> None:
    """Catches a check against a marker that was superseded, and a hint that leaves one of them."""
    folder = out / "_state" / "shards"
    shutil.copy(folder / "shard-00000.json", folder / "shard-00000.r1.json")
    values = json.loads((folder / "shard-00000.json").read_text())
    values["files"][0]["num_bytes"] += 1
    (folder / "shard-00000.json").write_text(json.dumps(values))
    assert reasons(out) == []
    (folder / "shard-00000.r2.json").write_text(json.dumps(values))
    (reason,) = reasons(out)
    assert "published were" in reason
    hint = redo_hint(Ledger(out), [0])
    assert hint is not None
    assert [f"shard-00000{name}.json" in hint for name in ("", ".r1", ".r2")] == [True] * 3
