"""Parquet files, and datasets from disk and from the Hub."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifest_fakes import good_rows, items, only_fault, opened, prompts, scan_peak_mib

from offline_diffusion.data.readers.parquet_bounds import ParquetBounds
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.scan import scan
from offline_diffusion.errors import ManifestError


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.txt", "rows"])
def test_parquet_is_known_by_content(tmp_path: Path, name: str) -> None:
    assert prompts(write(tmp_path / name, {"prompt": ["a", "b"]})) == ["a", "b"]


DIFFUSIONDB = {
    "image_name": ["a.png", "b.png"],
    "prompt": ["a fox", "a hen"],
    "part_id": pa.array([1, 2], pa.uint16()),
    "seed": pa.array([2**32 - 1, 7], pa.uint32()),
    "step": pa.array([50, 20], pa.uint16()),
    "cfg": pa.array([7.0, 12.5], pa.float32()),
    "sampler": pa.array([8, 3], pa.uint8()),
    "width": pa.array([512, 768], pa.uint16()),
    "height": pa.array([512, 1024], pa.uint16()),
    "user_name": ["u", None],
    "timestamp": pa.array([1, 2], pa.timestamp("us", "UTC")),
    "image_nsfw": pa.array([0.1, 2.0], pa.float32()),
    "prompt_nsfw": pa.array([0.5, 0.25], pa.float32()),
}


def test_diffusiondb_parquet_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "metadata.parquet", DIFFUSIONDB)
    first, second = good_rows(path)
    params = first.params
    assert (first.prompt, params.seed, params.width, params.height) == ("a fox", 2**32 - 1, 512, 512)
    assert (second.params.num_inference_steps, second.params.true_cfg_scale) == (20, 12.5)
    known = {"prompt", "seed", "step", "cfg", "width", "height"}
    table = pq.read_table(path).drop_columns(list(known))
    assert [first.carried, second.carried] == table.to_pylist()
    assert scan(opened(path)).carried_schema == table.schema


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**64 - 1], pa.uint64()),
        pa.array([decimal.Decimal(0), decimal.Decimal(2**64 - 1)], pa.decimal128(20, 0)),
        pa.array([decimal.Decimal(0), decimal.Decimal(2**64 - 1)], pa.decimal256(40, 4)),
        pa.array(["0", str(2**64 - 1)], pa.large_string()),
        pa.array(["0", str(2**64 - 1)]).dictionary_encode(),
    ],
    ids=["uint64", "decimal128", "decimal256", "text", "dictionary"],
)
def test_seeds_of_64_bits_survive_every_column_type(tmp_path: Path, column: pa.Array) -> None:
    path = write(tmp_path / "rows.parquet", {"prompt": ["a", "b"], "seed": column})
    assert [row.params.seed for row in good_rows(path)] == [0, 2**64 - 1]


def test_faulty_numbers_of_a_float_column(tmp_path: Path) -> None:
    seeds = [1.0, None, float("nan"), 1.5, 2.0**53, -1.0]
    path = write(tmp_path / "rows.parquet", {"prompt": list("abcdef"), "seed": seeds})
    found = items(path)
    assert [isinstance(item, RowFault) for item in found] == [False, False, True, True, True, True]
    assert isinstance(found[0], ManifestRow)
    assert found[0].params.seed == 1
    assert [item.value for item in found if isinstance(item, RowFault)] == [
        "NaN",
        "1.5",
        "9007199254740992.0",
        "-1.0",
    ]


CARRIED = {
    "list": [[1, 2], None],
    "struct": [{"a": 1, "b": ["x"]}, {"a": None, "b": []}],
    "bytes": [b"\x00\xff", b""],
    "date": [dt.date(2024, 1, 2), None],
    "time": pa.array([1, None], pa.time64("ns")),
    "instant": pa.array([1, 2**60], pa.timestamp("ns")),
    "far": pa.array([2**62, None], pa.timestamp("us")),
    "zoned": pa.array([1, 2], pa.timestamp("ms", "Asia/Tokyo")),
    "span": pa.array([1, None], pa.duration("ns")),
    "half": pa.array(np.array([1.5, 2.5], np.float16)),
    "flag": [True, None],
    "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
    "money": [decimal.Decimal("1.10"), None],
    "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
}


def test_carried_columns_of_every_type_survive(tmp_path: Path) -> None:
    from offline_diffusion.data.carried import carried_array

    path = write(tmp_path / "rows.parquet", {"prompt": ["a", "b"], **CARRIED})
    rows = good_rows(path)
    schema = scan(opened(path)).carried_schema
    written = pq.read_table(path).drop_columns(["prompt"])
    assert schema == written.schema
    for field in schema:
        array = carried_array([row.carried[field.name] for row in rows], field.type)
        assert array.equals(written[field.name].combine_chunks()), field.name


def test_text_that_is_not_utf8_costs_only_its_row(tmp_path: Path) -> None:
    binary = pa.array([b"good", b"caf\xe9", b"last"])
    for column in ("prompt", "note"):
        columns = {"prompt": pa.array(["a", "b", "c"]), column: binary.view(pa.string())}
        found = items(write(tmp_path / "rows.parquet", columns))
        assert [isinstance(item, RowFault) for item in found] == [False, True, False]
        assert isinstance(found[1], RowFault)
        assert (found[1].column, found[1].reason) == (column, "is not UTF-8")


def test_a_null_or_other_prompt_costs_only_its_row(tmp_path: Path) -> None:
    assert only_fault(write(tmp_path / "a.parquet", {"prompt": ["a", None]})).row == 1
    found = items(write(tmp_path / "b.parquet", {"prompt": pa.array([["a"], ["b"]])}))
    assert all(isinstance(item, RowFault) for item in found)


def test_row_groups_outside_the_ranges_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.parquet", {"prompt": [str(n) for n in range(5000)]}, row_group_size=100)
    manifest = opened(path)
    read: list[int] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *args: Any, row_groups: list[int], **options: Any) -> Any:
        read.extend(row_groups)
        return real(self, *args, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    wanted = [range(150, 160), range(199, 202), range(4990, 10**9)]
    found = [item.row for item in manifest.read(wanted)]
    assert found == [*range(150, 160), 199, 200, 201, *range(4990, 5000)]
    assert read == [1, 2, 49]


def test_a_damaged_row_group_is_an_error_that_names_file_and_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, 80))) for _ in range(4000)]
    path = write(tmp_path / "rows.parquet", {"prompt": texts}, row_group_size=1000, compression="zstd")
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 3000] = os.urandom(3000)
    path.write_bytes(data)
    with pytest.raises(ManifestError, match=r"rows\.parquet: cannot be read beyond about row 2000"):
        items(path)


def test_a_cut_off_footer_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", {"prompt": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ManifestError, match=r"rows\.parquet: cannot be read as Parquet"):
        opened(path)


def test_columns_of_one_name_and_missing_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table([["a"], ["b"], ["c"]], names=["prompt", "note", "note"])
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ManifestError, match="'note' occurs twice"):
        opened(tmp_path / "twice.parquet")
    path = write(tmp_path / "rows.parquet", {"prompt": ["a"]}, compression="brotli")

    def iter_batches(*_: Any, **__: Any) -> Any:
        raise pa.ArrowNotImplementedError("Support for codec 'brotli' not built")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    with pytest.raises(ManifestError, match=r"cannot be read here: .*brotli.*\nhint: .* pip install"):
        opened(path)


def test_rows_with_large_values_come_in_small_batches(tmp_path: Path) -> None:
    blobs = [os.urandom(2**20) for _ in range(24)]
    path = write(tmp_path / "rows.parquet", {"prompt": ["a"] * 24, "blob": blobs})
    with path.open("rb") as stream:
        assert ParquetBounds(stream).batch_rows(0, stream) <= 8
    assert [row.carried["blob"] for row in good_rows(path)] == blobs


def test_one_huge_row_group_does_not_change_the_memory(tmp_path: Path) -> None:
    num_rows = 120_000
    rng = np.random.default_rng(0)
    noise = rng.integers(97, 123, (num_rows, 600), dtype=np.uint8)
    prompt = pa.array([row.tobytes().decode() for row in noise])  # 72 MB that do not compress well
    table = {"prompt": prompt, "seed": np.arange(num_rows)}
    control = write(tmp_path / "many.parquet", table, row_group_size=5_000)
    huge = write(tmp_path / "one.parquet", table, row_group_size=num_rows)
    assert pq.ParquetFile(huge).metadata.num_row_groups == 1
    assert scan_peak_mib(huge, num_rows) <= scan_peak_mib(control, num_rows) + 20


# --- datasets ---------------------------------------------------------------------------------


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


def make_dataset(num_rows: int = 3) -> datasets.Dataset:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "seed": datasets.Value("uint64"),
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    columns = {
        "text": [f"prompt {n}" for n in range(num_rows)],
        "seed": [2**64 - 1 - n for n in range(num_rows)],
        "picture": [{"bytes": png("red"), "path": f"{n}.png"} for n in range(num_rows)],
        "kind": [n % 2 for n in range(num_rows)],
    }
    return datasets.Dataset(pa.table(columns, schema=features.arrow_schema))


def test_a_saved_dataset(tmp_path: Path) -> None:
    make_dataset(2500).save_to_disk(tmp_path / "saved", num_shards=3)
    manifest = opened(tmp_path / "saved")
    rows = [row for row in manifest.read() if isinstance(row, ManifestRow)]
    assert [row.prompt for row in rows] == [f"prompt {n}" for n in range(2500)]
    assert rows[7].params.seed == 2**64 - 8
    assert rows[7].carried == {"picture": {"bytes": png("red"), "path": "7.png"}, "kind": 1}
    assert [item.row for item in manifest.read([range(5, 7), range(2499, 3000)])] == [5, 6, 2499]


def test_image_features_survive_in_the_carried_schema(tmp_path: Path) -> None:
    make_dataset().save_to_disk(tmp_path / "saved")
    make_dataset().to_parquet(tmp_path / "rows.parquet")
    for source in ("saved", "rows.parquet"):
        schema = scan(opened(tmp_path / source)).carried_schema
        features = datasets.Features.from_arrow_schema(schema)
        assert features == {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": make_dataset(3), "test": make_dataset(1)}).save_to_disk(folder)
    assert len(items(f"{folder}:train")) == 3
    assert len(items(f"{folder}:test")) == 1
    with pytest.raises(ManifestError, match=r"splits: it has train, test\nhint: name one, such as .*:train"):
        opened(folder)
    with pytest.raises(ManifestError, match="no split 'dev'"):
        opened(f"{folder}:dev")
    (tmp_path / "other").mkdir()
    with pytest.raises(ManifestError, match="not a dataset made by save_to_disk"):
        opened(f"{tmp_path / 'other'}:train")


def test_a_damaged_saved_dataset(tmp_path: Path) -> None:
    make_dataset().save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(ManifestError, match="cannot be read as a saved dataset"):
        opened(tmp_path / "saved")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A Hub with one dataset of two splits; the calls to ``load_dataset`` are kept."""
    import huggingface_hub

    for split, num_rows in (("train", 5), ("test", 2)):
        make_dataset(num_rows).to_parquet(tmp_path / f"{split}.parquet")
    calls: list[dict[str, Any]] = []
    load = datasets.load_dataset

    def load_dataset(repo: str, **options: Any) -> Any:
        calls.append({"repo": repo, **options})
        files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}
        return load("parquet", data_files=files, streaming=options["streaming"])

    class Api:
        def dataset_info(self, repo: str, revision: str | None) -> Any:
            return SimpleNamespace(sha=f"sha-of-{revision}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return calls


def test_a_hub_dataset_is_streamed_at_a_pinned_commit(hub: list[dict[str, Any]]) -> None:
    manifest = opened("hf://datasets/owner/name@v1:train")
    rows = [row for row in manifest.read() if isinstance(row, ManifestRow)]
    assert [row.prompt for row in rows] == [f"prompt {n}" for n in range(5)]
    assert rows[0].carried["picture"]["bytes"] == png("red")
    assert hub == [{"repo": "owner/name", "revision": "sha-of-v1", "streaming": True}]
    [entry] = manifest.fingerprint()["files"]
    assert entry["digest"] == "commit:sha-of-v1"
    features = datasets.Features.from_arrow_schema(scan(manifest).carried_schema)
    assert features["picture"] == datasets.Image()


def test_splits_of_a_hub_dataset(hub: list[dict[str, Any]]) -> None:
    assert len(items("hf://datasets/owner/name:test")) == 2
    with pytest.raises(ManifestError, match="several splits"):
        opened("hf://datasets/owner/name")


def test_a_hub_that_cannot_be_reached() -> None:
    with pytest.raises(ManifestError, match=r"hf://datasets/owner/name: cannot be opened.*\nhint:"):
        opened("hf://datasets/owner/name")
