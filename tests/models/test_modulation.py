"""The table of what follows from a timestep alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.kernels.linear import MIN_ROWS
from offline_diffusion.models.modulation import ModulationTable

CPU = torch.device("cpu")


class Computed:
    """Rows ``(t, -t, 2t)``, in two parts; remembers what it was asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.calls: list[list[float]] = []
        self.dtype = dtype

    def __call__(self, timesteps: torch.Tensor) -> Iterator[torch.Tensor]:
        self.calls.append(timesteps.tolist())
        timesteps = timesteps.to(self.dtype)
        yield torch.stack((timesteps, -timesteps), dim=1)
        yield 2 * timesteps.unsqueeze(1)


def make_table(
    computed: Computed, dtype: torch.dtype = torch.float32, num_slots: int = 70
) -> ModulationTable:
    return ModulationTable(3, computed, dtype, CPU, num_slots)


packs = st.lists(
    st.lists(st.sampled_from([float(t) for t in range(90)]), min_size=1, max_size=20), max_size=12
)


@given(packs, st.lists(st.sampled_from([float(t) for t in range(90)]), max_size=100))
def test_every_request_gets_its_own_timesteps_row(packs: list[list[float]], later: list[float]) -> None:
    table = make_table(Computed())
    for timesteps in packs:
        slots = table.slots(timesteps, later)
        expected = torch.tensor([[t, -t, 2 * t] for t in timesteps])
        assert torch.equal(table.rows[slots], expected)


def test_a_timestep_is_computed_once_and_the_padding_is_put_to_use() -> None:
    computed = Computed()
    table = make_table(computed)
    later = [float(t) for t in range(500, 600)]
    table.slots([7.0, 3.0, 7.0], later)
    assert computed.calls == [[7.0, 3.0, *later[: MIN_ROWS - 2]]]
    table.slots([500.0, 3.0, 540.0], later)
    assert len(computed.calls) == 1


def test_timesteps_that_are_equal_in_the_models_dtype_share_a_row() -> None:
    computed = Computed(torch.bfloat16)
    table = make_table(computed, torch.bfloat16)
    slots = table.slots([999.0, 1001.0, 900.0]).tolist()  # bfloat16 steps by 4 from 512 to 1024
    assert slots[0] == slots[1] != slots[2]
    assert computed.calls == [[1000.0, 900.0]]


def test_the_least_recently_used_row_goes_first() -> None:
    computed = Computed()
    table = make_table(computed, num_slots=66)
    table.slots([1.0], [float(t) for t in range(2, 70)])  # 1 … 64
    table.slots([65.0], [66.0])
    table.slots([1.0])
    table.slots([100.0])  # takes the place of 2
    assert table.slots([1.0]).tolist() != table.slots([100.0]).tolist()
    assert len(computed.calls) == 3
    table.slots([2.0])
    assert computed.calls[3] == [2.0]


def test_more_requests_than_slots_make_the_table_grow() -> None:
    table = make_table(Computed(), num_slots=66)
    timesteps = [float(t) for t in range(200)]
    slots = table.slots(timesteps)
    assert torch.equal(table.rows[slots][:, 0], torch.tensor(timesteps))


def test_the_table_stays_where_it_is_while_the_pack_does() -> None:
    """A captured graph reads it by address."""
    table = make_table(Computed(), num_slots=66)
    table.slots([float(t) for t in range(30)])
    rows = table.rows
    for start in range(0, 900, 30):
        table.slots([float(t) for t in range(start, start + 30)])
    assert table.rows is rows


def test_rows_that_failed_half_way_are_computed_again() -> None:
    """Memory may run out between two parts; the retry must not find rows that are not there."""
    computed = Computed()
    fails = [True]

    def compute(timesteps: torch.Tensor) -> Iterator[torch.Tensor]:
        first, second = computed(timesteps)
        yield first
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("full")
        yield second

    table = ModulationTable(3, compute, torch.float32, CPU, 70)
    with pytest.raises(torch.OutOfMemoryError):
        table.slots([5.0], [6.0, 7.0])
    assert table.rows[table.slots([6.0, 5.0])].tolist() == [[6.0, -6.0, 12.0], [5.0, -5.0, 10.0]]


def test_a_table_that_could_not_grow_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(Computed(), num_slots=66)
    table.slots([1.0])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            table.slots([float(t) for t in range(200)])
    timesteps = [float(t) for t in range(200)]
    slots = table.slots(timesteps)
    assert table.rows[slots][:, 0].tolist() == timesteps


def _raise_out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("full")
