"""The dataset card: with it ``load_dataset(DIR, "images")`` works, here and on the Hub."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Any

import yaml

from offline_diffusion.data.files import disk_errors, replace_file
from offline_diffusion.data.layout import FAILURES, IMAGES, METRICS, TABLES
from offline_diffusion.data.ledger import Ledger
from offline_diffusion.data.marker import Marker
from offline_diffusion.data.remote_folder import RemoteFolder

CARD_FILE = "README.md"
_OURS = b"<!-- Written by offdiff. Delete this line to keep your own edits. -->"

_DESCRIPTIONS = {
    IMAGES: "the pictures, in manifest order, with their prompts, seeds and the manifest's other columns",
    METRICS: "one row a requested image, failed ones too: status, times, tokens, batch sizes",
    FAILURES: "quarantined rows and failed images, with the reason",
}


def write_card(ledger: Ledger) -> bool:
    """Writes ``README.md`` from what is published now.

    A card that somebody made their own is left alone.

    Returns:
        Whether it was written.

    Raises:
        JobError: It cannot be written.
    """
    ledger.look_again()
    content = make_card(ledger).encode("utf-8", "replace")
    if ledger.remote is not None:
        return _write_card_there(ledger.remote.storage, content)
    path = ledger.out / CARD_FILE
    with disk_errors(path):
        if path.exists() and _OURS not in path.read_bytes():
            return False
        replace_file(path, content, ledger.scratch)
    return True


def _write_card_there(storage: RemoteFolder, content: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if _OURS not in storage.read(CARD_FILE):
            return False
    storage.replace(CARD_FILE, content)
    return True


def make_card(ledger: Ledger) -> str:
    """The text of the card."""
    markers = ledger.markers().values()
    tables = _tables(markers)
    state = _state(ledger, markers)
    header = {
        "configs": [_config(table, state, default=table == tables[0]) for table in tables],
        "task_categories": ["text-to-image"],
        "tags": ["offdiff", "synthetic"],
    }
    return "\n".join(
        [
            "---",
            yaml.safe_dump(header, sort_keys=False).strip(),
            "---",
            _OURS.decode(),
            *_body(ledger, markers),
        ]
    )


def _tables(markers: Iterable[Marker]) -> list[str]:
    """Those that have rows, for a config without any does not load; at the start those that will."""
    present = {file.path.split("/")[0] for marker in markers for file in marker.files if file.num_rows}
    return [table for table in TABLES if table in present] or [IMAGES, METRICS]


def _state(ledger: Ledger, markers: Iterable[Marker]) -> str:
    """Names what is published now.

    ``datasets`` finds what it has read before by the folder's last name and these configs: without the
    state it would show the data of an earlier state, or of another folder of the same name.
    """
    digest = hashlib.blake2b(digest_size=8)
    for marker in markers:
        for file in marker.files:
            digest.update(f"{file.path} {file.num_bytes} {file.sha256}\n".encode())
    return f"job {ledger.job.job_id}, state {digest.hexdigest()}"


def _config(table: str, state: str, *, default: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"config_name": table, "data_files": f"{table}/*.parquet", "description": state}
    return config | {"default": True} if default else config


def _body(ledger: Ledger, markers: Iterable[Marker]) -> list[str]:
    job = ledger.job
    done = list(markers)
    num_rows = sum(marker.stop - marker.start for marker in done)
    name = job.identity.model.get("model") or job.identity.model.get("name") or "a diffusion model"
    counts = [
        ("rows of the manifest", job.identity.num_rows),
        ("rows done", num_rows),
        ("images", sum(marker.num_ok for marker in done)),
        ("failed images", sum(marker.num_failed for marker in done)),
        ("quarantined rows", sum(marker.num_invalid_rows for marker in done)),
        ("shards done", f"{len(done)} of {len(ledger.shards)}"),
    ]
    return [
        "",
        "# Generated images",
        "",
        f"Drawn by `{_plain(name)}` with offdiff, begun {job.created_at}.",
        "" if len(done) == len(ledger.shards) else "\nThe job is not finished: more shards will come.\n",
        "| | |",
        "|---|---:|",
        *(f"| {label} | {value} |" for label, value in counts),
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'images = load_dataset("PATH/TO/THIS/FOLDER", "images", split="train")',
        'images[0]["image"].show()',
        "```",
        "",
        *(f"- `{table}`: {_DESCRIPTIONS[table]}." for table in TABLES if table in _tables(done)),
        "",
        "Every image can be made again alone from its row of `images`: prompt, seed, size, steps and",
        "guidance are those that were used. `job.json` has the model, the options and the versions.",
        "",
        "The licence is not set: add the one that the model and the prompts allow.",
        "",
    ]


def _plain(value: Any) -> str:
    """Text that cannot leave its backticks."""
    return " ".join(str(value).replace("`", "'").split())
