"""Records of measurements: their fields, their ratios, and the file that keeps them. Free of torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PEAK_FLOPS = 790e12
"""bf16 matrix rate measured on an H200 with random data: the floor of every precision."""

FIELDS = (
    "workload",
    "system",
    "precision",
    "s_per_image",
    "wall_s_per_image",
    "images_per_s",
    "tflops_useful",
    "share_of_floor",
    "ratio_to_diffusers_serial",
    "ratio_to_diffusers_batch",
    "ratio_to_diffusers_serial_compiled",
    "ratio_to_diffusers_batch_compiled",
    "ratio_to_presorted",
    "gpu_idle_share",
    "step_fill",
)
"""Every record has these; null where they do not apply."""

RATIOS = {
    "ratio_to_diffusers_serial": "diffusers_serial",
    "ratio_to_diffusers_batch": "diffusers_batch",
    "ratio_to_diffusers_serial_compiled": "diffusers_serial_compiled",
    "ratio_to_diffusers_batch_compiled": "diffusers_batch_compiled",
    "ratio_to_presorted": "presorted",
}
"""Field → the system whose seconds an image are divided by the record's."""

Record = dict[str, Any]


def key(record: Record) -> tuple[str, str, str]:
    """What a record is of; a later one of the same key replaces it."""
    return record["workload"], record["system"], record["precision"]


def speed_fields(num_images: int, denoise_s: float, flops: float) -> Record:
    """The fields of speed: seconds are those of the denoise loop alone, for every system.

    Args:
        num_images: Drawn in ``denoise_s`` seconds.
        flops: Of real tokens, over all images.
    """
    return {
        "num_images": num_images,
        "denoise_s": denoise_s,
        "s_per_image": denoise_s / num_images,
        "images_per_s": num_images / denoise_s,
        "tflops_useful": flops / denoise_s / 1e12,
        "share_of_floor": flops / PEAK_FLOPS / denoise_s,
        "floor_s_per_image": flops / PEAK_FLOPS / num_images,
    }


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The records of one process with the ratios among them."""
    seconds = {key(record): record["s_per_image"] for record in records if record.get("s_per_image")}
    filled = []
    for record in records:
        own = seconds.get(key(record))
        bases = {field: seconds.get((record["workload"], rival, "bf16")) for field, rival in RATIOS.items()}
        ratios = {field: base / own if own and base else None for field, base in bases.items()}
        filled.append({**record, **rounded(ratios)})
    return filled


def merge(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """``old`` with the records of ``new`` put in the place of those with the same key, or appended."""
    merged = {key(record): record for record in old}
    merged.update({key(record): record for record in new})
    return list(merged.values())


def read(path: Path) -> list[Record]:
    """The records of a file; none when it is not there."""
    if not path.exists():
        return []
    records: list[Record] = json.loads(path.read_text(encoding="utf-8"))
    return records


def write(path: Path, records: Sequence[Record]) -> None:
    """Puts ``records`` in the file's place, whole."""
    replace_text(path, json.dumps(records, indent=1, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces the file in one move: a run that is killed leaves it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.tmp")
    building.write_text(text, encoding="utf-8")
    os.replace(building, path)


class Report:
    """The records of this process, printed and saved as they come.

    Args:
        path: Where they are merged with what is there; None saves nothing.
        origin: Fields that all have in common: device, versions, command.
    """

    def __init__(self, path: Path | None, origin: Record) -> None:
        self.records: list[Record] = []
        self._path, self._origin = path, origin

    def add(self, workload: str, system: str, precision: str, values: Record) -> Record:
        """Keeps a record; ratios of earlier ones that it makes possible are filled in as well."""
        head = {"workload": workload, "system": system, "precision": precision}
        record = {**dict.fromkeys(FIELDS), **rounded(values), **head, **self._origin}
        self.records = with_ratios(merge(self.records, [record]))
        if self._path is not None:
            write(self._path, merge(read(self._path), self.records))
        return next(record for record in self.records if key(record) == (workload, system, precision))


def rounded(values: Record) -> Record:
    """Numbers with five digits: more would be noise."""
    return {name: _round(value) for name, value in values.items()}


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return rounded(value)
    return float(f"{value:.5g}") if isinstance(value, float) else value


def portable_command(script: str, arguments: Sequence[str]) -> str:
    """The command as one would type it in the repository's root, without the machine's paths."""
    return " ".join(["python", _portable(script), *map(_portable, arguments)])


def _portable(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    path = Path(value)
    if path.is_absolute():
        value = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    elif value.startswith(("../", "~")):
        value = path.name
    return name + equals + value


def device_slug(name: str) -> str:
    """A device's name for a file: ``NVIDIA H200`` is ``h200``."""
    found = re.search(r"[A-Z]+\d+\w*", name)
    return (found.group() if found else name).lower().replace(" ", "-")


# --- for people ----------------------------------------------------------------------------------

COLUMNS = (
    ("s/image", "s_per_image", "{:.3f}"),
    ("wall", "wall_s_per_image", "{:.3f}"),
    ("TFLOP/s", "tflops_useful", "{:.0f}"),
    ("of floor", "share_of_floor", "{:.2f}"),
    ("×serial", "ratio_to_diffusers_serial", "{:.2f}"),
    ("×batch", "ratio_to_diffusers_batch", "{:.2f}"),
    ("×ser.comp", "ratio_to_diffusers_serial_compiled", "{:.2f}"),
    ("×bat.comp", "ratio_to_diffusers_batch_compiled", "{:.2f}"),
    ("idle", "gpu_idle_share", "{:.3f}"),
    ("fill", "step_fill", "{:.2f}"),
)


def header() -> str:
    """Of the lines that `line` makes."""
    names = "".join(f"{name:>10}" for name, _, _ in COLUMNS)
    return f"{'workload':<23}{'system':<27}{'':<5}{names}"


def line(record: Record) -> str:
    """A record as a line of a table; of a check, what it found."""
    head = f"{record['workload']:<23}{record['system']:<27}{record['precision']:<5}"
    if record["s_per_image"] is None:
        return head + "  " + ", ".join(f"{name} {value}" for name, value in record["found"].items())
    cells = ("-" if record[name] is None else form.format(record[name]) for _, name, form in COLUMNS)
    return head + "".join(f"{cell:>10}" for cell in cells)
