"""Traces in each format: what they say, and what is wrong with them, by line."""

from __future__ import annotations

import ast
import datetime as dt
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.bench.draws import DEFAULT_SIZES, Draws, Mixture
from offline_diffusion.bench.trace import Trace, read_mixture, read_trace
from offline_diffusion.bench.trace_formats import parse_request_line, to_seconds
from offline_diffusion.data.readers.base import BrokenRecord
from offline_diffusion.data.values import ValueFault
from offline_diffusion.errors import ManifestError, TraceError
from offline_diffusion.request import SamplingParams

GENTD26_HEADER = (
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,negative_prompt_length,"
    "num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora"
)
GENTD26 = f"""{GENTD26_HEADER}
2024-11-15 16:58:10,TXT_2_IMG,SUCCEED,43.0,G1,9.0,,1.0,40.0,M1,0
2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0,5.0,3.0,4.0,30.0,M0,0
2024-11-15 16:58:20,IMG_2_IMG,FAILED,,G0,,,,,,1
"""


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def faults(trace: Trace) -> list[tuple[int, str, str]]:
    return [(fault.line, fault.column, fault.reason) for fault in trace.faults]


def shapes(trace: Trace) -> list[tuple[float, int | None, int | None, int | None]]:
    params = [request.row.params for request in trace.requests]
    return [
        (request.arrival, own.width, own.height, own.num_inference_steps)
        for request, own in zip(trace.requests, params, strict=True)
    ]


# --- Request(…) lines -----------------------------------------------------------------------------

plain_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain_values, max_size=6))
def test_a_request_line_is_what_python_reads(values: dict[str, Any]) -> None:
    line = f"Request({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    parsed = parse_request_line(line)
    assert parsed == {name: ast.literal_eval(repr(value)) for name, value in values.items()}


@given(st.text())
def test_any_text_is_a_request_or_has_a_reason(text: str) -> None:
    parsed = parse_request_line(text)
    assert isinstance(parsed, dict) or parsed.reason


@given(st.text("Request()'\"\\=,[]{}0x1e.-+ \n", max_size=60))
def test_anything_in_the_brackets_is_a_request_or_has_a_reason(inner: str) -> None:
    parsed = parse_request_line(f"Request({inner})")
    assert isinstance(parsed, dict) or parsed.reason


@pytest.mark.parametrize(
    "inner",
    [
        "width=__import__('os').getcwd()",
        "width=" + "-" * 100_000 + "1",
        "width=" + "[" * 100_000,
        "width=2**99",
        "width=nan",
        "width=1e999",
        "width=" + "9" * 5000,
        "**{'width': 1}",
        "width=1 height=2",
        "width=1, width=2",
    ],
)
def test_nothing_in_a_request_line_is_evaluated(inner: str) -> None:
    assert isinstance(parse_request_line(f"Request({inner})"), BrokenRecord)


def test_request_lines(tmp_path: Path) -> None:
    source = written(
        tmp_path,
        "sd3_trace.txt",
        "Request(request_id=7, timestamp=4.5, height=512, width=768, num_frames=1, num_inference_steps=20, "
        "slo_ms=900, image_paths=None)\n\n"
        "Request(request_id='b', prompt='it\\'s \"a\" fox', timestamp=3, width=256, height=256, seed=5)\n"
        "Request(timestamp=5, width=oops, height=1)\n"
        "GET / HTTP/1.1\n"
        "Request(timestamp=6, num_frames=81)\n"
        "Request(timestamp='noon')\n"
        "Request(width=64, height=64)\n"
        "Request(timestamp=7, num_inference_steps=1.5)\n",
    )
    trace = read_trace(source)
    first, second = trace.requests
    assert (first.row.id, first.arrival, first.row.prompt, first.row.params.seed) == (
        ("b", 0.0, 'it\'s "a" fox', 5)
    )
    assert (second.row.id, second.arrival, second.slo_ms) == ("7", 1.5, 900.0)
    assert second.row.prompt.split()
    assert (second.row.params.height, second.row.params.width) == (512, 768)
    assert [(line, column) for line, column, _ in faults(trace)] == [
        (4, "width"),
        (5, ""),
        (6, "num_frames"),
        (7, "timestamp"),
        (8, "timestamp"),
        (9, "num_inference_steps"),
    ]
    assert str(trace.faults[0]).startswith(f"{source}:4: width=oops")


def test_request_lines_under_any_name(tmp_path: Path) -> None:
    line = "Request(timestamp=0, width=64, height=64)\n"
    assert len(read_trace(written(tmp_path, "trace.log", line)).requests) == 1
    assert len(read_trace(written(tmp_path, "trace.csv", line)).requests) == 1


# --- our own schema, OpenAI, DiffusionDB ----------------------------------------------------------


def test_json_lines_are_manifest_rows_with_a_time(tmp_path: Path) -> None:
    rows = [
        {"id": "x", "timestamp": 10, "prompt": "a fox", "size": "512x256", "steps": 8, "slo_ms": 1500},
        {"timestamp": "2024-01-01", "prompt": "no time of day"},
        {"timestamp": 12.5, "text": "an owl", "n": 3},
        {"prompt": "no time"},
        {"timestamp": 11, "prompt": "  "},
        {"timestamp": 11, "prompt": "a cat", "slo_ms": -1},
    ]
    text = "\n".join([*map(json.dumps, rows), "{", ""])
    trace = read_trace(written(tmp_path, "trace.jsonl.gz", gzip.compress(text.encode())))
    assert shapes(trace) == [(0.0, 512, 256, 8), (2.5, None, None, None)]
    assert trace.requests[0].slo_ms == 1500
    assert trace.requests[1].row.params.num_images_per_prompt == 3
    assert [fault.line for fault in trace.faults] == [2, 4, 5, 6, 7]
    assert trace.faults[0].reason == "must be seconds or a date with a time, such as 2024-11-15 16:57:50"


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([5, "2024-11-15 16:57:50", "7"], "is a date, but the first time of the trace is seconds"),
        (
            ["2024-11-15 16:57:50", 5, "2024-11-15T16:57:52Z"],
            "is seconds, but the first time of the trace is a date",
        ),
    ],
)
def test_numbers_and_dates_have_no_zero_in_common(tmp_path: Path, times: list[Any], reason: str) -> None:
    rows = [{"prompt": "a fox", "timestamp": time} for time in times]
    trace = read_trace(written(tmp_path, "t.jsonl", "\n".join(map(json.dumps, rows))))
    assert [request.arrival for request in trace.requests] == [0.0, 2.0]
    assert faults(trace) == [(2, "timestamp", reason)]


def test_openai_batch_lines(tmp_path: Path) -> None:
    lines = [
        {"custom_id": "a", "method": "POST", "body": {"prompt": "a fox", "size": "256x512", "n": 2}},
        {"custom_id": "b", "body": {"prompt": "an owl", "size": "wide"}},
        {"custom_id": "c", "body": "no object"},
    ]
    trace = read_trace(written(tmp_path, "batch.jsonl", "\n".join(map(json.dumps, lines))))
    assert not trace.has_times
    assert [request.row.id for request in trace.requests] == ["a"]
    assert shapes(trace) == [(0.0, 256, 512, None)]
    assert faults(trace) == [
        (2, "size", "must be text of the form WIDTHxHEIGHT, such as 1024x768"),
        (3, "body", "must be an object that holds the prompt"),
    ]


@pytest.mark.parametrize("unit", ["us", "ms", "ns", "s"])
def test_diffusiondb_metadata(tmp_path: Path, unit: str) -> None:
    start = dt.datetime(2022, 8, 20, 9, 0, 0, tzinfo=dt.UTC)
    times = [start + dt.timedelta(seconds=second) for second in (60, 0, 90)]
    table = pa.table(
        {
            "image_name": ["a.png", "b.png", "c.png"],
            "prompt": ["a fox", "an owl", ""],
            "seed": pa.array([1, 2**32 - 1, 3], pa.uint32()),
            "step": pa.array([50, 20, 30], pa.uint16()),
            "cfg": pa.array([7.0, 0.0, 7.0], pa.float32()),
            "width": pa.array([512, 768, 512], pa.uint16()),
            "height": pa.array([512, 512, 512], pa.uint16()),
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")).cast(pa.timestamp(unit, tz="UTC")),
        }
    )
    pq.write_table(table, tmp_path / "metadata.parquet")
    trace = read_trace(str(tmp_path / "metadata.parquet"))
    assert shapes(trace) == [(0.0, 768, 512, 20), (60.0, 512, 512, 50)]
    assert trace.requests[0].row.params.seed == 2**32 - 1
    assert faults(trace) == [(3, "prompt", "must not be blank")]


# --- GenTD26 --------------------------------------------------------------------------------------


def test_gentd26(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "lora_request_trace.csv", GENTD26))
    assert [request.arrival for request in trace.requests] == [0.0, 20.0, 30.0]
    first, second, third = (request.row for request in trace.requests)
    assert first.params.num_images_per_prompt == 4
    assert first.params.num_inference_steps == 30
    assert len(first.prompt.split()) == 5
    assert len((first.params.negative_prompt or "").split()) == 3
    assert second.params.negative_prompt is None
    assert third.prompt.strip()
    assert third.params.num_images_per_prompt == 1
    assert {row.params.width for row in (first, second, third)} <= {side for side, *_ in DEFAULT_SIZES}
    assert any("--sizes" in note for note in trace.notes)
    again = read_trace(trace.source)
    assert again == trace


def test_a_file_with_gmt_create_keeps_what_it_says_itself(tmp_path: Path) -> None:
    header = "gmt_create,prompt,negative_prompt,size,seed,slo_ms,num_inference_steps,num_lora"
    rows = ["2024-11-15 16:57:50,an owl,blurry,64x32,7,900,9,2", "2024-11-15 16:57:51,,,,,,,"]
    trace = read_trace(written(tmp_path, "t.csv", "\n".join([header, *rows])))
    own, drawn = trace.requests
    params = own.row.params
    assert (own.row.prompt, params.negative_prompt, own.slo_ms) == ("an owl", "blurry", 900)
    assert (params.width, params.height, params.seed, params.num_inference_steps) == (64, 32, 7, 9)
    assert len(drawn.row.prompt.split()) > 1
    assert drawn.row.params.width in {side for side, *_ in DEFAULT_SIZES}
    whole = read_trace(written(tmp_path, "whole.csv", "\n".join([header, rows[0]])))
    assert not whole.notes


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("yesterday,T,S,1,G,5,5,1,30,M,0", "gmt_create"),
        ("2024-13-15 16:57:50,T,S,1,G,5,5,1,30,M,0", "gmt_create"),
        ("2024-11-15 16:57:50,T,S,1,G,many,5,1,30,M,0", "prompt_length"),
        ("2024-11-15 16:57:50,T,S,1,G,5,-1,1,30,M,0", "negative_prompt_length"),
        ("2024-11-15 16:57:50,T,S,1,G,5,5,0,30,M,0", "num_images_per_prompt"),
        ("2024-11-15 16:57:50,T,S,1,G,5,5,1,0.5,M,0", "num_inference_steps"),
        ("2024-11-15 16:57:50,T,S,1", ""),
        (",T,S,1,G,5,5,1,30,M,0", "timestamp"),
    ],
)
def test_a_faulty_row_of_gentd26_has_its_line_and_reason(tmp_path: Path, row: str, column: str) -> None:
    trace = read_trace(written(tmp_path, "lora_request_trace.csv", f"{GENTD26}{row}\n"))
    assert len(trace.requests) == 3
    [fault] = trace.faults
    assert (fault.line, fault.column) == (5, column)
    assert fault.reason


def test_the_whole_gentd26_trace(shared: Path) -> None:
    trace = read_trace(str(shared / "traces" / "gentd26_lora_request_trace.csv"))
    assert len(trace.requests) == 26_823
    assert not trace.faults
    assert trace.requests[-1].arrival == (dt.datetime(2024, 12, 8, 17, 33, 57) - dt.datetime(2024, 11, 15, 16, 57, 50)).total_seconds()  # fmt: skip  # noqa: E501
    # Counted with awk: the sum of the column, 25 blank cells as 1.
    assert sum(request.row.params.num_images_per_prompt for request in trace.requests) == 72_220


# --- mixtures -------------------------------------------------------------------------------------

KINDS = [
    {"width": 512, "height": 512, "num_inference_steps": 20, "weight": 0.25},
    {"width": 1024, "height": 768, "num_inference_steps": 30, "weight": 0.75},
]


def test_a_mixture_is_drawn_as_vllm_omni_draws_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "mix.json", json.dumps(KINDS)), limit=50, seed=42)
    expected = random.Random(42).choices(KINDS, weights=[0.25, 0.75], k=50)
    assert [width for _, width, _, _ in shapes(trace)] == [kind["width"] for kind in expected]
    assert not trace.has_times
    assert len({request.row.row for request in trace.requests}) == 50


@pytest.mark.parametrize(
    ("kinds", "line", "problem"),
    [
        ([{"width": 512, "weight": 1}, {"width": "wide", "weight": 1}], 3, "width"),
        ([{"width": 512, "weight": 1}, {"width": 512, "weight": "most"}], 3, "weight"),
        ([{"width": 512, "weight": 1}, {"width": 512, "weight": -1}], 3, "weight"),
        ([{"width": 512, "weight": 1}, {"width": 512}], None, "have none"),
        ([{"width": 512, "weight": 0}], None, "no weight is above 0"),
        ([{"width": 512}], None, "no weighted kinds"),
    ],
)
def test_a_faulty_mixture_is_refused(
    tmp_path: Path, kinds: list[Any], line: int | None, problem: str
) -> None:
    text = "[\n" + ",\n".join(map(json.dumps, kinds)) + "\n]"
    source = written(tmp_path, "mix.json", text)
    with pytest.raises(TraceError, match=problem) as caught:
        read_mixture(source)
    if line is not None:
        assert f"{source}:{line}: " in str(caught.value)


def test_sizes_come_from_a_mixture_only_where_there_are_none(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "height": 64, "width": 32}, {"prompt": "c", "steps": 3}]
    source = written(tmp_path, "rows.jsonl", "\n".join(map(json.dumps, rows)))
    sizes = Mixture([SamplingParams(height=96, width=80, num_inference_steps=9)], [1.0])
    trace = read_trace(source, Draws(sizes=sizes))
    assert shapes(trace) == [(0.0, 80, 96, 9), (0.0, 32, 64, None), (0.0, 80, 96, 3)]


def test_prompts_are_drawn_where_there_are_none(tmp_path: Path) -> None:
    source = written(tmp_path, "t.txt", "Request(timestamp=0)\nRequest(timestamp=1, prompt='own')\n")
    prompts = [request.row.prompt for request in read_trace(source, Draws(prompts=["given"])).requests]
    assert prompts == ["given", "own"]


# --- any file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.json", "t.csv", "t.parquet"])
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_file_is_a_trace_or_says_why_not(tmp_path_factory: Any, name: str, content: bytes) -> None:
    source = written(tmp_path_factory.mktemp("any"), name, content)
    try:
        trace = read_trace(source, limit=5)
    except (TraceError, ManifestError):
        return
    assert trace.requests
    assert all(fault.line >= 1 and fault.reason for fault in trace.faults)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["timestamp", "prompt", "width", "height", "steps", "slo_ms", "n", "weight"]),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([])),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_line_becomes_a_request_or_a_fault(rows: list[dict[str, Any]]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(map(json.dumps, rows)) + "\n")
        file.flush()
        try:
            trace = read_trace(file.name)
        except (TraceError, ManifestError):
            return
    if not any("weight" in row for row in rows):
        told = {request.row.line for request in trace.requests} | {fault.line for fault in trace.faults}
        assert told == set(range(1, len(rows) + 1))
    assert all(request.arrival >= 0 for request in trace.requests)
    assert [r.arrival for r in trace.requests] == sorted(r.arrival for r in trace.requests)


cells = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "2024-11-15 16:57:50", "9999-99-99 00:00:00", "1e9", "0x10", "None", "'", '"', "(", "]"]
    ),
)


def lines_told(source: str) -> set[int]:
    trace = read_trace(source)
    assert all(fault.reason for fault in trace.faults)
    return {request.row.line for request in trace.requests} | {fault.line for fault in trace.faults}


@given(st.lists(cells, min_size=11, max_size=11))
def test_any_row_of_gentd26_is_told_by_its_line(tmp_path_factory: Any, row: list[str]) -> None:
    line = ",".join(cell.translate({ord(c): None for c in ',"\r\n'}) for cell in row)
    line = "".join(c for c in line if c.isprintable())
    source = written(tmp_path_factory.mktemp("csv"), "t.csv", f"{GENTD26}{line}\n")
    assert lines_told(source) == {2, 3, 4, 5}


@given(st.lists(st.tuples(st.sampled_from(["timestamp", "width", "prompt", "seed", "x"]), cells), max_size=5))
def test_any_request_line_is_told_by_its_line(tmp_path_factory: Any, fields: list[tuple[str, str]]) -> None:
    inner = ", ".join(f"{name}={value}" for name, value in fields)
    inner = "".join(c for c in inner if c.isprintable())
    text = f"Request(timestamp=1)\nRequest({inner})\n"
    source = written(tmp_path_factory.mktemp("lines"), "t.txt", text)
    assert lines_told(source) == {1, 2}


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(json_values)
def test_any_openai_line_is_told_by_its_line(tmp_path_factory: Any, body: Any) -> None:
    lines = [{"custom_id": "a", "body": {"prompt": "a fox"}}, {"custom_id": "b", "body": body}]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    assert lines_told(written(tmp_path_factory.mktemp("openai"), "t.jsonl", text)) == {1, 2}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        read_trace(str(tmp_path / "nothing.jsonl"))


def test_a_trace_of_faults_alone_is_refused_with_the_first(tmp_path: Path) -> None:
    source = written(tmp_path, "t.txt", "Request(timestamp=soon)\n")
    with pytest.raises(TraceError, match=r"holds no request; the first fault: .*t\.txt:1: timestamp"):
        read_trace(source)


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (3, 3.0),
        ("2.5", 2.5),
        ("1970-01-01 00:01:00", 60.0),
        ("1970-01-01T01:00:00+01:00", 0.0),
        ("1970-01-01T00:00:00.250Z", 0.25),
        (dt.datetime(1970, 1, 2), 86_400.0),
    ],
)
def test_times(value: Any, seconds: float) -> None:
    assert to_seconds(value) == seconds


@pytest.mark.parametrize("value", [True, "noon", "1970-02-30 00:00:00", float("nan"), [], "2024-01-01"])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(ValueFault):
        to_seconds(value)


def test_windows_speed_and_made_up_times(tmp_path: Path) -> None:
    rows = [{"timestamp": time, "prompt": "a"} for time in (100, 110, 120, 130)]
    trace = read_trace(written(tmp_path, "t.jsonl", "\n".join(map(json.dumps, rows))))
    assert [r.arrival for r in trace.window(10, 30).requests] == [0.0, 10.0]
    assert [r.arrival for r in trace.sped_up(4).requests] == [0.0, 2.5, 5.0, 7.5]
    made_up = trace.at("poisson", 2.0, seed=1)
    assert [r.row for r in made_up.requests] == [r.row for r in trace.requests]
    assert made_up.requests[0].arrival == 0.0
