"""Manifests that nobody would write, and what reading one may come to."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from offline_diffusion.data.manifest import open_manifest
from offline_diffusion.data.rows import RowDefaults
from offline_diffusion.data.scan import scan
from offline_diffusion.data.validate import validate
from offline_diffusion.errors import OffdiffError
from offline_diffusion.models import registry, tiny

SAMPLES = Path(__file__).resolve().parents[2] / "manifests"
MAX_SECONDS = 5.0
"""Of one manifest; most take a few milliseconds."""
MAX_BYTES = 64 * 1024

SUFFIXES = (".jsonl", ".csv", ".tsv", ".txt", ".json", ".parquet", ".jsonl.gz", ".csv.zst", "", ".md")
_CONFIGS = {"transformer/config.json": tiny.TRANSFORMER_CONFIG, "vae/config.json": tiny.VAE_CONFIG}
CAPABILITIES = registry.FAMILIES[0].capabilities(_CONFIGS.__getitem__)

TOKENS = (
    b'"', b'""', b"'", b",", b"\t", b"\n", b"\r", b"\r\n", b"\0", b"\\", b"\\u", b"\\ud800", b"[", b"]",
    b"{", b"}", b":", b"null", b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 5000, b"0x", b"true",
    b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1",
    b"prompt", b"id", b"body", b"custom_id", b"size", b'"prompt"', b'{"prompt": "a"}', b"[" * 300,
    b" " * 2000, b"\xe2\x80\xa8", b"<!DOCTYPE", b"-",
)  # fmt: skip

_HARMS_A_TERMINAL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Rows = list[dict[str, Any]]


class Outcomes:
    """Reads manifests as ``offdiff validate`` does, and counts how they end.

    Args:
        folder: Where each manifest lies while it is read; the last one stays there.
    """

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self._folder = folder

    def read(self, name: str, content: bytes, label: str) -> None:
        """Reads one manifest.

        Raises:
            AssertionError: It ends in anything but a report or an error for the user, or takes too long;
                names ``label`` and the path of the manifest.
        """
        path = self._folder / name
        path.write_bytes(content)
        started = time.monotonic()
        try:
            outcome = self._outcome(path)
        except Exception as error:
            raise AssertionError(f"{label}: {error!r}; the manifest is {self._keep(path, label)}") from error
        seconds = time.monotonic() - started
        assert seconds < MAX_SECONDS, f"{label}: {seconds:.1f} s; the manifest is {self._keep(path, label)}"
        self.slowest = max(self.slowest, seconds)
        self.counts[outcome] += 1
        path.unlink()

    def _keep(self, path: Path, label: str) -> Path:
        return path.rename(path.with_name(f"{label.replace(' ', '-')}-{path.name}"))

    def _outcome(self, path: Path) -> str:
        try:
            manifest = open_manifest([str(path)])
            report = validate(manifest, capabilities=CAPABILITIES, defaults=RowDefaults())
            num_faults = sum(self._check(fault, path) for fault in report)
            assert report.num_faulty_rows <= report.num_rows
            index = scan(manifest)
            assert index.num_rows == report.num_rows
            return "faults" if num_faults else "good"
        except OffdiffError as error:
            told = str(error)
        assert len(told) < 4000
        return "error"

    @staticmethod
    def _check(fault: Any, path: Path) -> bool:
        assert not _HARMS_A_TERMINAL.search(str(fault)), ascii(str(fault))
        assert fault.file == str(path)
        return True


# --- formats ----------------------------------------------------------------------------------


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def delimited(rows: Rows, delimiter: str) -> bytes:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def parquet(rows: Rows, **options: Any) -> bytes:
    """Columns of one type each: what does not fit becomes text."""
    names = list(dict.fromkeys(column for row in rows for column in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            columns[name] = pa.array([ascii(value) for value in values])
    sink = io.BytesIO()
    pq.write_table(pa.table(list(columns.values()), names=[ascii(name) for name in names]), sink, **options)
    return sink.getvalue()


def openai(rows: Rows) -> bytes:
    return jsonl([{"custom_id": str(n), "method": "POST", "body": row} for n, row in enumerate(rows)])


def by_id(rows: Rows) -> bytes:
    return json.dumps({f"r{n}": row for n, row in enumerate(rows)}, indent=1).encode()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    ".jsonl": jsonl,
    ".csv": lambda rows: delimited(rows, ","),
    ".tsv": lambda rows: delimited(rows, "\t"),
    ".txt": lambda rows: b"\n".join(str(row.get("prompt")).encode("utf-8", "replace") for row in rows),
    ".json": lambda rows: json.dumps(rows, indent=2).encode(),
    "-by-id.json": by_id,
    ".parquet": parquet,
    ".jsonl.gz": lambda rows: gzip.compress(jsonl(rows), 1, mtime=0),
    ".jsonl.zst": lambda rows: zstandard.compress(jsonl(rows)),
    "-batch.jsonl": openai,
}


# --- damage -----------------------------------------------------------------------------------


def samples() -> list[bytes]:
    """The manifests of this repository, and some of them in other formats."""
    found = [
        path.read_bytes() for path in sorted(SAMPLES.rglob("*")) if path.is_file() and path.suffix != ".md"
    ]
    rows = [json.loads(line) for line in (SAMPLES / "quickstart.jsonl").read_text().splitlines()]
    found += [make(rows) for make in FORMATS.values()]
    found += [
        parquet(rows, store_schema=False, compression=codec) for codec in ("none", "zstd", "gzip", "lz4")
    ]
    return found


def mutated(seed: int, bases: list[bytes]) -> tuple[str, bytes]:
    """A file name and the bytes of a sample, damaged in ways that follow from ``seed``."""
    rng = random.Random(seed)
    content = bytearray(rng.choice(bases))
    if content.startswith(b"PAR1") and rng.random() < 0.5:
        return f"m{rng.choice(SUFFIXES)}", _with_damaged_footer(content, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 30))):
        _damage(content, rng, bases)
        del content[MAX_BYTES:]
    pack = rng.choice(
        (bytes, bytes, bytes, bytes, lambda raw: gzip.compress(raw, 1, mtime=0), zstandard.compress)
    )
    return f"m{rng.choice(SUFFIXES)}", pack(bytes(content))


def _with_damaged_footer(parquet: bytearray, rng: random.Random) -> bytes:
    """Elsewhere most damage is found at once; here it makes numbers that fit, and are wrong."""
    num_bytes = int.from_bytes(parquet[-8:-4], "little")
    for _ in range(rng.choice((1, 1, 2))):
        parquet[rng.randrange(len(parquet) - 8 - num_bytes, len(parquet) - 8)] = rng.randrange(256)
    return bytes(parquet)


def _damage(content: bytearray, rng: random.Random, bases: list[bytes]) -> None:
    at = rng.randrange(len(content) + 1)
    stop = min(len(content), at + rng.choice((1, 2, 4, 16, 200)))
    kind = rng.randrange(8)
    if kind == 0 and content:
        content[at % len(content)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        content[at:stop] = rng.randbytes(stop - at)
    elif kind == 2:
        del content[at:stop]
    elif kind == 3:
        content[at:at] = rng.choice(TOKENS)
    elif kind == 4:
        content[at:stop] = rng.choice(TOKENS)
    elif kind == 5:
        del content[at:]
    elif kind == 6:
        content[at:at] = content[at:stop] * rng.choice((2, 50, 1000))
    else:
        other = rng.choice(bases)
        start = rng.randrange(len(other) + 1)
        content[at:stop] = other[start : start + 500]
