"""The compact sets and tables of a shard's images against plain sets and dictionaries."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from output_fakes import make_fault, make_row

from offline_diffusion.data.partial import ImageKey, Slot
from offline_diffusion.data.rows import ManifestRow, RowFault
from offline_diffusion.data.shard_images import ImageKeys, ShardImages, SlotTable

COUNTS = st.lists(st.integers(0, 4), max_size=8)
"""Images of each row; 0 is a faulty row."""

FIRST_ROW = 7


def make_rows(counts: list[int]) -> list[ManifestRow | RowFault]:
    numbered = enumerate(counts, FIRST_ROW)
    return [make_row(row, images=count) if count else make_fault(row) for row, count in numbered]


def all_keys(counts: list[int]) -> list[ImageKey]:
    return [(row, index) for row, count in enumerate(counts, FIRST_ROW) for index in range(count)]


@given(COUNTS)
def test_every_image_has_its_number(counts: list[int]) -> None:
    images, keys = ShardImages(make_rows(counts)), all_keys(counts)
    assert len(images) == len(keys)
    assert [images.key(number) for number in range(len(images))] == keys
    assert [images.number(key) for key in keys] == list(range(len(keys)))
    for row, count in enumerate(counts, FIRST_ROW):
        assert images.number((row, count)) is None
        assert images.number((row, -1)) is None
    assert images.number((FIRST_ROW - 1, 0)) is None
    assert images.number((FIRST_ROW + len(counts), 0)) is None
    assert ImageKeys.all_of(images) == set(keys)


@given(COUNTS, st.data())
def test_slots_are_kept_as_a_dictionary_would(counts: list[int], data: st.DataObject) -> None:
    images, keys = ShardImages(make_rows(counts)), all_keys(counts)
    slots, expected = SlotTable(images), dict[ImageKey, Slot]()
    puts = st.tuples(st.sampled_from(keys), st.sampled_from("ab"), st.sampled_from(("ok", "failed")))
    for number, (key, name, status) in enumerate(data.draw(st.lists(puts)) if keys else []):
        slots[key] = expected[key] = Slot(Path(name), number * 2**33, number + 2**34, status)
    assert {key: slots.get(key) for key in keys if key in slots} == expected
    assert (len(slots), slots.num_ok) == (len(expected), sum(s.status == "ok" for s in expected.values()))
    assert slots.keys() == set(expected)
    assert len(slots.keys()) == len(expected)
    assert slots.missing() == set(keys) - set(expected)
    for row in range(FIRST_ROW - 1, FIRST_ROW + len(counts) + 1):
        assert slots.keys().num_in_row(row) == sum(key[0] == row for key in expected)


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    slots = SlotTable(ShardImages(make_rows([2])))
    before = slots.keys()
    slots[FIRST_ROW, 1] = Slot(tmp_path, 0, 1, "ok")
    assert before == set()
    assert slots.keys() == {(FIRST_ROW, 1)}
    assert (FIRST_ROW, 1) not in slots.missing()
    assert "text" not in before
