"""Writes README's tables of measurements from the committed results, so that they cannot drift from them.

    python benchmarks/publish.py                    # README from benchmarks/results/h200_qwen_image.json
    python benchmarks/publish.py out/a.json b.json  # merges these files into the results first

Free of torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from records import PEAK_FLOPS, ROOT, Record, key, merge, read, write
from workloads import make_workloads

RESULTS = ROOT / "benchmarks" / "results" / "h200_qwen_image.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: benchmarks/publish.py writes this -->", "<!-- end of measured -->"

RIVAL_COLUMNS = (
    ("diffusers alone", ("diffusers_serial", "bf16")),
    ("8 together", ("diffusers_batch", "bf16")),
    ("alone, compiled", ("diffusers_serial_compiled", "bf16")),
    ("8 together, compiled", ("diffusers_batch_compiled", "bf16")),
)
OUR_COLUMNS = (
    ("**offdiff bf16**", ("packed", "bf16")),
    ("**fp8**", ("packed", "fp8")),
    ("**int8**", ("packed", "int8")),
)
ERROR_COLUMNS = (
    ("noise prediction, relative L2", "noise_pred_relative_l2", "{:.4f}"),
    ("final latents, relative L2", "latents_relative_l2", "{:.4f}"),
    ("pixels, PSNR", "psnr_db", "{:.1f} dB"),
)


def tables(records: Sequence[Record]) -> str:
    """Markdown between the markers: speed, then exactness and error; empty without records."""
    parts = [part for part in (_speed_table(records), _check_lines(records)) if part]
    return "\n\n".join(parts)


def _speed_table(records: Sequence[Record]) -> str:
    found = {key(record): record for record in records if record["s_per_image"]}
    columns = [*RIVAL_COLUMNS, *OUR_COLUMNS]
    head = ["s an image", *(title for title, _ in columns), "bf16 against alone / 8 together", "floor"]
    rows = []
    for name, workload in make_workloads().items():
        own = {column: found.get((name, *column)) for _, column in columns}
        measured = [record for record in own.values() if record]
        if not measured:
            continue
        cells = [_cell(own[column], is_ours=column[0] == "packed") for _, column in columns]
        ratios = _ratios(own["packed", "bf16"])
        rows.append([workload.label, *cells, ratios, f"{measured[-1]['floor_s_per_image']:.2f}"])
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    note = (
        "Seconds of the denoise loop alone, so that like is compared with like; in brackets TFLOP/s of real "
        f"tokens, and after the bar the whole run's seconds, text encoding, decoding and copies included. "
        f"The floor counts real tokens at {PEAK_FLOPS / 1e12:.0f} TFLOP/s."
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note}"


def _cell(record: Record | None, *, is_ours: bool) -> str:
    if record is None:
        return "–"
    if not is_ours:
        return f"{record['s_per_image']:.2f}"
    return f"{record['s_per_image']:.2f} ({record['tflops_useful']:.0f}) \\| {record['wall_s_per_image']:.2f}"


def _ratios(record: Record | None) -> str:
    ratios = [record and record[f"ratio_to_diffusers_{name}"] for name in ("serial", "batch")]
    return " / ".join(f"{ratio:.1f}×" if ratio else "–" for ratio in ratios)


def _check_lines(records: Sequence[Record]) -> str:
    found = {key(record): record["found"] for record in records if "found" in record}
    lines = []
    for (workload, _, precision), values in found.items():
        if workload == "exactness":
            lines.append(_exactness_line(precision, values))
        elif workload == "promise_cost":
            lines.append(f"- The exactness promise costs {values['full_pack']:.1%} of a full step.")
        elif workload == "plan_estimate":
            lines.append(
                f"- `offdiff plan`, after a run of the mixed 16, of the uniform mix: "
                f"{values['planned_s']:.0f} s; it took {values['real_s']:.0f} s."
            )
        elif precision != "bf16":
            errors = (
                f"{title} {form.format(values[name])}" for title, name, form in ERROR_COLUMNS if values[name]
            )
            lines.append(f"- {precision} against bf16 (random weights): " + ", ".join(errors) + ".")
    return "\n".join(lines)


def _exactness_line(precision: str, values: Record) -> str:
    differences = [values[f"max_abs_{what}"] for what in ("noise_pred", "latents", "pixels")]
    largest = max(difference for difference in differences if difference is not None)
    verdict = "no bit differs" if largest == 0 else f"differences up to {largest:g}"
    return (
        f"- Packed against alone, {precision}, {values['num_compositions']} random compositions and "
        f"{values['num_jobs']} whole jobs: {verdict}."
    )


def with_tables(text: str, records: Sequence[Record]) -> str:
    """``text`` with what stands between the markers replaced.

    Raises:
        ValueError: A marker is not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text lacks {BEGIN!r} or, after it, {END!r}")
    inner = tables(records)
    return before + BEGIN + "\n" + (f"\n{inner}\n\n" if inner else "") + END + after


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json", help="merged in this order")
    paths = parser.parse_args(arguments).results
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    records = read(RESULTS)
    for path in paths:
        records = merge(records, read(path))
    if paths:
        write(RESULTS, records)
    README.write_text(with_tables(README.read_text(encoding="utf-8"), records), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
