"""Devices against one: the arithmetic in closed form, and the whole command on two CPU workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_scaling
import pyarrow.parquet as pq
import pytest
import scaling
from bench_scaling import BenchError, check_settings, check_space, manifest_rows
from job_watch import Samples, Sitting, cpu_of_tree, file_name, pid_of
from records import ROOT

SCRIPT = ROOT / "benchmarks" / "bench_scaling.py"


def sitting(**values: Any) -> Sitting:
    return Sitting(**{"started": 100.0, "ended": 200.0, "begun": {"w": 120.0}, **values})


def test_a_first_sitting_draws_from_its_first_image_handed_over_to_the_last_one_done() -> None:
    seen = sitting(begun={"late": 123.0, "early": 120.0}, first_step_done=125.0)
    assert scaling.span_of(seen, 190.0, is_first=True) == scaling.Span(120.0, 190.0)


def test_a_later_sitting_draws_from_when_its_first_step_is_over() -> None:
    seen = sitting(first_step_done=125.0)
    assert scaling.span_of(seen, 190.0, is_first=False).seconds == 65.0


def test_a_stopped_sitting_draws_until_the_stop_was_asked_for() -> None:
    assert scaling.span_of(sitting(stopped=180.0), None, is_first=True).seconds == 60.0


@pytest.mark.parametrize(
    ("values", "is_first"),
    [
        ({"begun": {}, "stopped": 110.0}, True),  # stopped while the model was loaded
        ({"first_step_done": None, "stopped": 121.0}, False),  # while it warmed up
        ({"first_step_done": 190.0, "stopped": 180.0}, False),
    ],
)
def test_a_sitting_that_came_to_no_step_counts_nothing(values: dict[str, Any], is_first: bool) -> None:
    assert scaling.span_of(sitting(**values), None, is_first=is_first).seconds == 0.0


def figures(drawing_s: float, start: float, begun: dict[str, float], **values: Any) -> dict[str, Any]:
    return {
        "started": start - 10.0,
        "wall_s": drawing_s + 20.0,
        "drawing_from": start,
        "drawing_to": start + drawing_s,
        "drawing_s": drawing_s,
        "drawing_cpu_s": drawing_s,
        "cpu_s": 2 * (drawing_s + 20.0),
        "num_cores": 4,
        "begun": begun,
        "gpus": {},
        **values,
    }


def row(index: int, task: int, finished_at: float, device_s: float = 4.0, worker: str = "") -> dict[str, Any]:
    return {
        "row": index,
        "image_index": 0,
        "status": "ok",
        "task": task,
        "worker": worker or f"host:{task + 1}:ab",
        "device_s": device_s,
        "peak_memory_bytes": 2**30 * (task + 1),
        "finished_at": finished_at,
    }


def test_two_sittings_add_up() -> None:
    sittings = [
        figures(30.0, 1000.0, {"host_1_ab": 1000.0}, gpus={"0": (1.0, 1500.0)}),
        figures(10.0, 2000.0, {"host_2_ab": 1999.0}, gpus={"0": (0.6, 1900.0)}),
    ]
    rows = [row(0, 0, 1020.0), row(1, 0, 2004.0), row(2, 0, 2010.0)]
    found = scaling.figures_of(sittings, rows, ["0"])
    assert found["drawing_s"] == 40.0
    assert found["images_per_s"] == 3 / 40
    assert found["wall_s"] == 80.0
    assert (found["first_image_s"], found["first_image_drawing_s"]) == (30.0, 20.0)
    assert found["host_cpu_share"] == pytest.approx(1 / 4)
    assert found["host_cpu_share_wall"] == pytest.approx(2 / 4)
    assert found["device_drawing_s"] is None
    (device,) = found["devices"]
    assert device["outside_steps_share"] == pytest.approx(1 - 12 / 40)
    assert device["idle_share"] == pytest.approx(1 - (30 * 1.0 + 10 * 0.6) / 40)
    assert device["sm_mhz"] == pytest.approx(1600.0)


def test_a_device_that_comes_late_or_ends_early_costs_scaling() -> None:
    """Two devices as fast as one: the second begins 4 s late, so the job takes 52 s for 100 s of work."""
    one = scaling.figures_of(
        [figures(100.0, 0.0, {"host_1_ab": 0.0})], [row(n, 0, 10.0 * (n + 1)) for n in range(10)], ["0"]
    )
    rows = [row(n, n % 2, 52.0 if n > 7 else 5.0 * n + 6) for n in range(10)]
    rows[8]["finished_at"] = 50.0
    many = scaling.figures_of([figures(52.0, 0.0, {"host_1_ab": 0.0, "host_2_ab": 4.0})], rows, ["0", "1"])
    found = scaling.compare(one, many, 2)
    assert found["scaling"] == pytest.approx(100 / 52)
    assert found["scaling_each_from_its_start"] == pytest.approx(100 / 50)
    assert found["scaling_wall"] == pytest.approx(120 / 72)
    assert found["efficiency"] == pytest.approx(50 / 52)
    assert [each["last_image_before_end_s"] for each in many["devices"]] == [2.0, 0.0]
    assert many["tail_s"] == 2.0


def test_samples_count_only_what_lies_inside() -> None:
    samples = Samples()
    for second in range(10):
        samples.add(float(second), 3.0 * second, {"0": (10.0 * second, 1000.0)})
    assert samples.cpu_between(2.0, 6.0) == 12.0
    assert samples.gpu_between(2.0, 6.0, "0") == (pytest.approx(0.4), 1000.0)
    assert samples.gpu_between(2.0, 6.0, "1") is None
    assert samples.cpu_between(20.0, 30.0) == 0.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processor_seconds_of_children_that_ended_count() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\ninput()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True)
    try:
        while (seconds := cpu_of_tree(parent.pid)) < 0.4 and parent.poll() is None:
            pass
        assert 0.4 <= seconds < 5.0
    finally:
        parent.communicate("\n")


def image(index: int, sha256: str) -> dict[str, Any]:
    return {"row": index, "image_index": 0, "id": str(index), "sha256": sha256}


def test_datasets_are_equal_only_image_by_image() -> None:
    theirs = [image(0, "a"), image(1, "b")]
    assert scaling.compare_pixels(theirs[::-1], theirs)["equal"]
    changed = scaling.compare_pixels([image(0, "a"), image(1, "c")], theirs)
    assert (changed["equal"], changed["num_differing"], changed["differing_rows"]) == (False, 1, [1])
    assert not scaling.compare_pixels(theirs[:1], theirs)["equal"]
    assert scaling.compare_pixels(theirs[:1], theirs, is_part=True)["equal"]
    assert not scaling.compare_pixels([*theirs, image(2, "d")], theirs, is_part=True)["equal"]
    assert scaling.compare_pixels([*theirs, theirs[0]], theirs)["num_twice"] == 1
    assert not scaling.compare_pixels([*theirs, theirs[0]], theirs)["equal"]
    assert not scaling.compare_pixels([], [])["equal"]


def test_what_a_killed_worker_leaves_is_told_by_lives() -> None:
    seen = figures(90.0, 0.0, {"host_1_ab": 0.0, "host_2_ab": 1.0, "host_3_ab": 60.0})
    seen |= {"killed": 16.0, "victim": "host_2_ab", "restarts": ["died: started again"], "ended": 95.0}
    rows = [
        row(0, 0, 14.0, worker="host:1:ab"),
        row(1, 1, 15.0, worker="host:2:ab"),
        row(2, 0, 30.0, worker="host:1:ab"),
        row(3, 0, 59.0, worker="host:1:ab"),
        row(4, 1, 80.0, worker="host:3:ab"),
    ]
    found = scaling.kill_figures([seen], rows)
    assert (found["killed_after_s"], found["back_after_s"]) == (16.0, 44.0)
    assert found["num_images_by_victim"] == 1
    assert found["num_images_by_others_meanwhile"] == 2
    assert found["num_images_by_its_next_life"] == 1
    assert scaling.kill_figures([{**seen, "killed": None}], rows) == {"killed": False}


def test_a_worker_is_found_by_its_name() -> None:
    assert pid_of(file_name("a_host.example:4711:0a1b")) == 4711


def test_problems_are_told() -> None:
    fine = {"each_image_once": True, "verify_exit_code": 0}
    killed = {**fine, "killed": True, "restarts": ["x"]}
    assert scaling.problems({"one": fine, "killed": killed}, {"pixels": {"equal": True}}) == []
    bad = {"one": {"each_image_once": False, "verify_exit_code": 1}, "killed": {**killed, "restarts": []}}
    found = scaling.problems(bad, {"pixels": {"equal": False, "num_differing": 3}})
    assert [line.split(":")[0] for line in found] == ["one", "one", "pixels", "killed"]


def test_the_mix_goes_on_with_other_prompts_and_seeds() -> None:
    rows = manifest_rows(80, 20, [], scale=1)
    assert len({r["prompt"] for r in rows}) == len({r["seed"] for r in rows}) == 80
    assert sum("negative_prompt" not in r for r in rows) == 16
    shapes = [(r["height"], r["width"]) for r in rows[:32]]
    assert {shapes.count(shape) for shape in shapes} == {4}
    assert manifest_rows(16, 20, ["a", "b"], scale=1)[3]["prompt"] == "b"
    assert manifest_rows(16, 20, [], scale=1) == rows[:16]


def test_a_folder_of_another_setting_is_refused(tmp_path: Path) -> None:
    check_settings(tmp_path, {"images": 4, "steps": 2}, {"images": 4, "steps": 2})
    with pytest.raises(BenchError, match="images 4 there, 8 here"):
        check_settings(tmp_path, {"images": 4}, {"images": 8})


def test_a_full_disk_is_told_before_anything_is_built(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(BenchError, match="1000000000 GB"):
        check_space(tmp_path, 10**18)


# --- the whole command ---------------------------------------------------------------------------


def bench(work: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, record and everything said."""
    command = [sys.executable, str(SCRIPT), "--work", str(work), "--tiny", "--budget", "1024", *arguments]
    command += ["--images", "48", "--killed-images", "48"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    lines = done.stdout.splitlines()
    record = json.loads(lines[-1]) if done.returncode in (0, 1, 75) else {}
    return done.returncode, record, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_finds_a_kill_equal_pixels_and_adds_sittings_up(tmp_path: Path) -> None:
    code, record, said = bench(
        tmp_path / "w", "--jobs", "killed", "many", "--output", str(tmp_path / "r.json")
    )
    assert code == 0, said
    killed = record["jobs"]["killed"]
    assert killed["killed"]
    assert "died of SIGKILL: started again" in killed["restarts"][0]
    assert killed["num_images_by_others_meanwhile"] > 0
    assert killed["each_image_once"]
    assert killed["verify_exit_code"] == 0
    assert not record["complete"]
    assert [each["num_images"] > 0 for each in record["jobs"]["many"]["devices"]] == [True, True]
    assert all(0 < each["outside_steps_share"] < 1 for each in record["jobs"]["many"]["devices"])

    seconds, code = bench_scaling.STOP_S, bench_scaling.NOT_DONE
    for _ in range(12):  # 4 s longer each: some sittings end while they load, some while they draw
        seconds += 4.0
        code, record, said = bench(tmp_path / "w", "--jobs", "one", "--seconds", str(seconds))
        if code != bench_scaling.NOT_DONE:
            break
        assert "the same command goes on" in said
    assert code == 0, said
    one = record["jobs"]["one"]
    assert one["num_sittings"] == len(one["sittings"]) > 1
    assert one["drawing_s"] == pytest.approx(sum(each["drawing_s"] for each in one["sittings"]))
    assert one["images_per_s"] == pytest.approx(48 / one["drawing_s"])
    assert record["complete"]
    assert record["pixels"]["equal"]
    assert record["pixels_killed"]["equal"]
    assert record["pixels"]["num_compared"] == 48
    assert record["scaling"]["scaling"] == pytest.approx(
        record["jobs"]["many"]["images_per_s"] / one["images_per_s"]
    )
    assert len(record["commands"]) == 1 + len(one["sittings"])

    spoil(next((tmp_path / "w" / "many" / "images").glob("*.parquet")))
    code, record, said = bench(tmp_path / "w")
    assert code == 1, said
    assert record["pixels"]["num_differing"] == 1
    assert "pixels: 1 images differ from one device's" in record["problems"]

    code, _, said = bench(tmp_path / "w", "--steps", "3")
    assert code == 2
    assert "another setting: steps 20 there, 3 here" in said


def spoil(path: Path) -> None:
    """Changes one image's digest in a published table."""
    table = pq.read_table(path)
    digests = table["sha256"].to_pylist()
    digests[0] = "0" * 64
    at = table.schema.get_field_index("sha256")
    pq.write_table(table.set_column(at, table.schema.field(at), [digests]), path)
