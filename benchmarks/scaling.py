"""From what was seen of a job, and its own tables, to figures. Free of torch."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from job_watch import Sitting, file_name

METRICS = ["row", "image_index", "status", "task", "worker", "device_s", "peak_memory_bytes", "finished_at"]
IMAGES = ["row", "image_index", "id", "prompt", "seed", "width", "height", "sha256"]

TARGET = 1.95
MIN_JOB_S = 300.0

Row = dict[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Part of a job in which it drew, in seconds since the epoch."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.stop - self.start)


def read_rows(out: Path, table: str, columns: Sequence[str]) -> list[Row]:
    """All rows of a published table; ``finished_at`` in seconds since the epoch."""
    rows: list[Row] = []
    for path in sorted((out / table).glob("*.parquet")):
        rows += pq.ParquetFile(path).read(columns=list(columns)).to_pylist()
    for row in rows:
        if "finished_at" in row:
            row["finished_at"] = row["finished_at"].timestamp()
    return rows


def span_of(sitting: Sitting, last_image: float | None, *, is_first: bool) -> Span:
    """When a sitting drew.

    It begins when the first worker hands its first image to its engine. A later sitting begins when its first
    step is over: what a step takes longer while kernels are compiled, an undisturbed job pays once. It ends
    with the job's last image, or where the job was stopped, when the stop was asked for: what it still does
    then is left out. Either makes the sum over sittings smaller than an undisturbed job's, never larger.

    Args:
        sitting: Which.
        last_image: When the last image of the job was done; None where it was not done in this sitting.
        is_first: Whether no sitting drew before.
    """
    stop = last_image if last_image is not None else sitting.stopped or sitting.ended
    if not sitting.begun:
        return Span(stop, stop)
    begun = min(sitting.begun.values())
    if not is_first:
        # Said before a first step was over: this sitting is all warm-up.
        begun = stop if sitting.first_step_done is None else sitting.first_step_done
    return Span(min(begun, stop), stop)


def figures_of(sittings: Sequence[Figures], metrics: Sequence[Row], devices: Sequence[str]) -> Figures:
    """The figures of a finished job.

    Args:
        sittings: As `sitting_figures` makes them, those that drew nothing included.
        metrics: The job's rows, with `METRICS`.
        devices: As ``--devices`` names them, by task.
    """
    drawing_s = sum(each["drawing_s"] for each in sittings)
    wall_s = sum(each["wall_s"] for each in sittings)
    ends = sorted(row["finished_at"] for row in metrics)
    by_task = defaultdict(list)
    for row in metrics:
        by_task[row["task"]].append(row)
    of_devices = [
        _device_figures(device, by_task[task], sittings, drawing_s, ends[-1])
        for task, device in enumerate(devices)
    ]
    return {
        "num_images": len(metrics),
        "num_sittings": len(sittings),
        "drawing_s": drawing_s,
        "images_per_s": len(metrics) / drawing_s,
        "wall_s": wall_s,
        "images_per_s_wall": len(metrics) / wall_s,
        "device_drawing_s": _device_drawing_s(sittings, by_task, len(devices)),
        "first_image_s": ends[0] - sittings[0]["started"],
        "first_image_drawing_s": ends[0] - sittings[0]["drawing_from"],
        "tail_s": max((each["last_image_before_end_s"] for each in of_devices), default=0.0),
        "host_cpu_share": sum(each["drawing_cpu_s"] for each in sittings)
        / sum(each["drawing_s"] * each["num_cores"] for each in sittings),
        "host_cpu_share_wall": sum(each["cpu_s"] for each in sittings)
        / sum(each["wall_s"] * each["num_cores"] for each in sittings),
        "devices": of_devices,
    }


def _device_figures(
    device: str, rows: Sequence[Row], sittings: Sequence[Figures], drawing_s: float, end: float
) -> Figures:
    busy_s = sum(row["device_s"] or 0.0 for row in rows)
    found = [(each["gpus"][device], each["drawing_s"]) for each in sittings if each["gpus"].get(device)]
    weight = sum(seconds for _, seconds in found)
    means = [sum(pair[i] * seconds for pair, seconds in found) / weight for i in (0, 1)] if weight else None
    return {
        "device": device,
        "num_images": len(rows),
        "in_steps_s": busy_s,
        "outside_steps_share": 1 - busy_s / drawing_s,
        "idle_share": 1 - means[0] if means else None,
        "sm_mhz": means[1] if means else None,
        "peak_memory_gib": max((row["peak_memory_bytes"] or 0 for row in rows), default=0) / 2**30,
        "last_image_before_end_s": end - max((row["finished_at"] for row in rows), default=end),
    }


def _device_drawing_s(
    sittings: Sequence[Figures], by_task: Mapping[int, Sequence[Row]], num_devices: int
) -> float | None:
    """Seconds from each device's own first image to the job's last, a device's mean; of one sitting only."""
    if len(sittings) != 1:
        return None
    begun, to = sittings[0]["begun"], sittings[0]["drawing_to"]
    task_of = {file_name(row["worker"]): task for task, rows in by_task.items() for row in rows}
    first: dict[int, float] = {}
    for name, at in begun.items():
        if (task := task_of.get(name)) is not None:
            first[task] = min(at, first.get(task, at))
    if len(first) < num_devices:
        return None
    return float(sum(to - at for at in first.values()) / num_devices)


def compare(one: Figures, many: Figures, num_devices: int) -> Figures:
    """What several devices are to one, on the same images.

    ``scaling`` counts from the first image of the first worker, so workers that come later, and those that
    have nothing left to do at the end, cost it. ``scaling_each_from_its_start`` counts for each device from
    its own first image: the tail costs, the loading of the model does not. ``scaling_wall`` is of whole
    commands, with the loading.
    """
    each = many["device_drawing_s"]
    return {
        "num_devices": num_devices,
        "scaling": many["images_per_s"] / one["images_per_s"],
        "scaling_each_from_its_start": one["drawing_s"] / each if each else None,
        "scaling_wall": one["wall_s"] / many["wall_s"],
        "efficiency": many["images_per_s"] / one["images_per_s"] / num_devices,
    }


def compare_pixels(ours: Sequence[Row], theirs: Sequence[Row], *, is_part: bool = False) -> Figures:
    """Whether two datasets hold the same images.

    Args:
        ours, theirs: Rows with `IMAGES`.
        is_part: ``ours`` may lack images of ``theirs``.
    """
    mine, other = _by_key(ours), _by_key(theirs)
    lacking = [] if is_part else sorted(other.keys() - mine.keys())
    differing = sorted(key for key, row in mine.items() if other.get(key) != row)
    num_twice = sum(count - 1 for rows in (ours, theirs) for count in Counter(map(_key, rows)).values())
    return {
        "num_compared": len(mine),
        "num_differing": len(differing) + len(lacking),
        "num_twice": num_twice,
        "equal": bool(mine) and not (differing or lacking or num_twice),
        "differing_rows": [row for row, _ in [*differing, *lacking][:8]],
    }


def _key(row: Row) -> tuple[int, int]:
    return row["row"], row["image_index"]


def _by_key(rows: Sequence[Row]) -> dict[tuple[int, int], Row]:
    return {_key(row): row for row in rows}


def kill_figures(sittings: Sequence[Figures], metrics: Sequence[Row]) -> Figures:
    """What became of a job of which a worker was killed."""
    at = next((each for each in sittings if each["killed"] is not None), None)
    if at is None:
        return {"killed": False}
    killed, victim = at["killed"], at["victim"]
    later = sorted((when, name) for name, when in at["begun"].items() if when > killed)
    back = later[0][0] if later else None
    until = back if back is not None else at["ended"]
    names = {name for _, name in later}
    worker_of = [(file_name(row["worker"]), row["finished_at"]) for row in metrics]
    return {
        "killed": True,
        "killed_after_s": killed - at["drawing_from"],
        "restarts": at["restarts"],
        "back_after_s": None if back is None else back - killed,
        "num_images_by_victim": sum(name == victim for name, _ in worker_of),
        "num_images_by_others_meanwhile": sum(
            name != victim and killed < when <= until for name, when in worker_of
        ),
        "num_images_by_its_next_life": sum(name in names for name, _ in worker_of),
    }


def problems(jobs: dict[str, Any], compared: dict[str, Any]) -> list[str]:
    """What is not as it should be, but for speed."""
    found = [f"{name}: lost, failed or twice" for name, job in jobs.items() if not job["each_image_once"]]
    found += [f"{name}: `offdiff verify` finds it broken" for name in jobs if jobs[name]["verify_exit_code"]]
    found += [
        f"{name}: {values['num_differing']} images differ from one device's"
        for name, values in compared.items()
        if name.startswith("pixels") and not values["equal"]
    ]
    if "killed" in jobs and not jobs["killed"]["killed"]:
        found.append("killed: no worker was killed, the job was too short")
    elif "killed" in jobs and not jobs["killed"]["restarts"]:
        found.append("killed: nobody noticed")
    return found


def print_summary(record: dict[str, Any]) -> None:
    """For people."""
    print(f"\n{record['num_cores']} cores, {', '.join(record['hardware'])}; ceiling: 1 × a device")
    for name, job in record["jobs"].items():
        print(
            f"{name:<7}{job['num_images']:>5} images in {job['drawing_s']:.1f} s: "
            f"{job['images_per_s']:.3f} images/s; wall {job['wall_s']:.0f} s; first image after "
            f"{job['first_image_s']:.0f} s; host CPU {job['host_cpu_share']:.1%}; "
            f"{job['num_sittings']} sittings"
        )
        for each in job["devices"]:
            idle = "not told" if each["idle_share"] is None else f"{each['idle_share']:.1%}"
            print(
                f"       {each['device']}: {each['num_images']} images, idle {idle}, outside steps "
                f"{each['outside_steps_share']:.1%}, last image {each['last_image_before_end_s']:.1f} s early"
            )
    for name in ("scaling", "pixels", "pixels_killed"):
        if name in record:
            print(f"{name}: {json.dumps(record[name])}")
    if "scaling" in record and not record["settings"]["tiny"]:
        reached, long = record["scaling"]["scaling"], record["jobs"]["many"]["drawing_s"]
        verdict = "reached" if reached >= TARGET and long >= MIN_JOB_S else "missed"
        print(f"target {TARGET} × on a job of {MIN_JOB_S:.0f} s: {verdict}: {reached:.3f} ×, {long:.0f} s")
    for problem in record["problems"]:
        print(f"problem: {problem}")
