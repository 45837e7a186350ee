"""The page: whole, self-contained, nothing of the trace gets out of its text; what its charts show."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from bench_fakes import engine_of, trace_of
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.bench.metrics import summarize
from offline_diffusion.bench.page import MAX_CLASSES, OTHERS, at_hand, busiest, page
from offline_diffusion.bench.records import RequestRecord
from offline_diffusion.bench.report import Report, Run, number, seconds
from offline_diffusion.bench.session import Session
from offline_diffusion.bench.svg import BOTTOM, LEFT, RIGHT, TOP, Chart, nice_ticks
from offline_diffusion.engine.cost import CostModel

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def run_of(name: str, *, count: int = 20, seqs: int = 4, spread: bool = False) -> Run:
    engine, clock = engine_of(CostModel(0.5, 0.001, 0), seqs=seqs)
    trace = trace_of([index / 4 for index in range(count)], steps=3)
    if spread:
        from bench_fakes import asked

        trace = [asked(row, row / 4, side=16 * (1 + row % 12), steps=2) for row in range(count)]
    return Session(trace).replay(name, {"max_num_seqs": seqs}, engine, clock)


def outline(*runs: Run, trace: str = "trace.jsonl") -> Outline:
    parsed = Outline()
    parsed.feed(page(Report(trace, "tiny", {"device": "CPU"}, runs)))
    assert not parsed.open
    return parsed


@pytest.mark.parametrize("runs", [1, 3])
def test_it_needs_nothing_from_elsewhere_and_runs_no_script(runs: int) -> None:
    parsed = outline(*(run_of(f"mode {index}") for index in range(runs)))
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "img", "object"}
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in parsed.tags)
    assert "url(" not in parsed.text
    assert "@import" not in parsed.text


def test_names_from_a_trace_stay_text() -> None:
    evil = "</title><script>alert(1)</script>\"'&"
    run = run_of(evil)
    for record in run.replayed.records:
        record.id = evil
    parsed = outline(run, trace=evil)
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert evil in parsed.text


def test_numbers_of_each_run_stand_in_the_summary() -> None:
    fast, slow = run_of("fast", seqs=8), run_of("slow", seqs=1)
    text = page(Report("t", "m", {}, [fast, slow]))
    row = re.search(r"<tr><td>latency, p95</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert row is not None
    assert row.groups() == (seconds(fast.numbers["latency_p95"]), seconds(slow.numbers["latency_p95"]))


def test_a_run_that_was_ended_early_is_marked_and_has_no_curve() -> None:
    whole, cut = run_of("whole"), run_of("cut")
    replayed = replace(cut.replayed, records=cut.replayed.records[:5], num_unfinished=95)
    cut = replace(cut, replayed=replayed, numbers=summarize(replayed))
    text = page(Report("t", "m", {}, [whole, cut]))
    assert "<th>whole</th><th>cut (stopped early, 5 of 100)</th>" in text
    assert "<h2>cut (stopped early, 5 of 100)</h2>" in text
    assert "<td>requests unfinished</td><td>0</td><td>95</td>" in text
    done_within = text[text.index("Done within") : text.index("Latency against load")]
    assert "whole" in done_within
    assert "cut" not in done_within
    assert "5 of 100" in outline(cut).text


def test_many_sizes_share_a_colour() -> None:
    run = run_of("many", count=60, spread=True)
    assert len(run.numbers["size_classes"]) > MAX_CLASSES
    assert OTHERS in outline(run).text


def test_an_empty_replay_has_a_page() -> None:
    assert "requests done" in outline(run_of("none", count=0)).text


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_who_is_at_hand_when_a_request_comes(spans: list[tuple[int, int]]) -> None:
    records = [
        RequestRecord(str(i), 8, 8, 1, 1, float(start), finished=float(start + length))
        for i, (start, length) in enumerate(spans)
    ]
    expected = [
        sum(other.arrival <= own.arrival < (other.finished or 0) for other in records) for own in records
    ]
    assert at_hand(records) == expected


def test_the_busiest_are_around_the_crowd() -> None:
    rng = random.Random(0)
    calm = [RequestRecord(f"c{i}", 8, 8, 1, 1, 100.0 * i, finished=100.0 * i + 1) for i in range(50)]
    crowd = [RequestRecord(f"x{i}", 8, 8, 1, 1, 2000 + rng.random(), finished=2050.0) for i in range(9)]
    found = busiest([*calm, *crowd], count=9)
    assert sum(record.id.startswith("x") for record in found) >= 5
    assert [record.arrival for record in found] == sorted(record.arrival for record in found)


# --- charts ---------------------------------------------------------------------------------------


@given(st.floats(0, 1e6), st.floats(1e-2, 1e9), st.integers(2, 8))
def test_ticks_are_round_evenly_spaced_and_within(low: float, span: float, count: int) -> None:
    ticks = nice_ticks(low, low + span, count)
    assert all(low - span * 1e-6 <= tick <= low + span * 1.000001 for tick in ticks)
    assert len(ticks) <= count + 1


def test_ticks_of_a_few_ranges() -> None:
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(0, 53.7, 6) == [0, 10, 20, 30, 40, 50]
    assert nice_ticks(3, 3) == [3]


def svg_of(chart: Chart) -> ET.Element:
    found = re.search(r"<svg.*</svg>", str(chart))
    assert found is not None
    return ET.fromstring(found[0])


def test_a_point_lies_where_its_values_say() -> None:
    chart = Chart("t", "x", "y", x_max=10, y_max=4, width=560, height=260)
    chart.dots([(5, 1, "<half & quarter>")], "red")
    circle = svg_of(chart).find("{*}circle")
    assert circle is not None
    assert float(circle.get("cx", "")) == pytest.approx(LEFT + (560 - LEFT - RIGHT) / 2, abs=0.1)
    assert float(circle.get("cy", "")) == pytest.approx(TOP + (260 - TOP - BOTTOM) * 3 / 4, abs=0.1)
    assert circle[0].text == "<half & quarter>"


def test_bins_that_touch_are_one_outline() -> None:
    chart = Chart("t", "x", "y", x_max=10, y_max=4)
    chart.steps([(2, 4, 3), (4, 5, 1), (8, 9, 2)], "blue")
    outline = next(shape for shape in svg_of(chart).iter() if shape.get("fill") == "blue")
    x, y = chart.x, chart.y
    assert outline.get("d") == (
        f"M{x(2):.1f},{y(0):.0f}V{y(3):.1f}H{x(4):.1f}V{y(1):.1f}H{x(5):.1f}V{y(0):.0f}"
        f"M{x(8):.1f},{y(0):.0f}V{y(2):.1f}H{x(9):.1f}V{y(0):.0f}"
    )


def test_a_bar_reaches_from_its_start_to_its_end() -> None:
    chart = Chart("t", "x", "y", x_max=10, y_max=1)
    chart.bar(1, 2, 4, "blue", "text")
    bar = next(shape for shape in svg_of(chart).iter() if shape.get("fill") == "blue")
    assert float(bar.get("x", "")) == pytest.approx(chart.x(2), abs=0.1)
    assert float(bar.get("width", "")) == pytest.approx(chart.x(4) - chart.x(2), abs=0.1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.1841, "184 ms"), (2.049, "2.05 s"), (1234.6, "1,235 s"), (36000.0, "10.0 h")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_numbers() -> None:
    assert [number(value) for value in (None, 0, 2.0, 1234.5)] == ["-", "0", "2", "1,234"]
