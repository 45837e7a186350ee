"""A whole job over rows made to do harm: nothing is written outside its folder, nothing runs in its card."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from job_fakes import SMALL, Runner, write_jsonl

IDS = [
    "../../escaped",
    "/tmp/offdiff-escaped",
    "a/../../b",
    "C:\\x",
    "..",
    "~",
    "😀" * 1024,
    "-rf",
    "$(touch x)",
]
HTML = "<script>alert(1)</script><img src=x onerror=alert(2)> --- </body> `x` | a | {{ x }}"


def test_ids_and_prompts_are_values_and_nothing_else(tmp_path: Path) -> None:
    """Would catch a file named after an id, and a card that quotes what the manifest says."""
    rows = [{"id": name, "prompt": HTML, "note": HTML, HTML: "x"} for name in IDS]
    out = tmp_path / "in" / "deep" / "out"
    out.parent.mkdir(parents=True)
    manifest = write_jsonl(tmp_path / "rows.jsonl", rows)
    before = set(tmp_path.rglob("*"))
    summary = Runner().run(manifest, out, device="cpu", **SMALL)
    assert summary.num_ok == len(IDS)

    made = {path.relative_to(tmp_path).parts for path in set(tmp_path.rglob("*")) - before}
    assert {parts[:3] for parts in made} == {("in", "deep", "out")}
    shown = {parts[3:] for parts in made if parts[3:] and parts[3] != "_state"}
    assert shown == {
        ("README.md",),
        ("job.json",),
        ("images",),
        ("images", "shard-00000.parquet"),
        ("metrics",),
        ("metrics", "shard-00000.parquet"),
    }
    assert not Path("/tmp/offdiff-escaped").exists()
    for name in IDS:
        assert not any(name in part for parts in made for part in parts[3:] if len(name) > 2)

    table = pq.read_table(out / "images" / "shard-00000.parquet")
    assert table["id"].to_pylist() == IDS
    assert table["prompt"].to_pylist() == table["note"].to_pylist() == [HTML] * len(IDS)
    card = (out / "README.md").read_text()
    assert "<script" not in card
    assert "onerror" not in card
    assert card.count("\n---\n") == 1
