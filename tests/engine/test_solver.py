"""The table of schedules."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offline_diffusion.engine.solver import SigmaTable


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_every_request_stands_at_its_own_place(steps: list[int], data: st.DataObject) -> None:
    sigmas = [torch.linspace(1, 0, n + 1) + index for index, n in enumerate(steps)]
    places = [data.draw(st.integers(0, n - 1)) for n in steps]
    table = SigmaTable(sigmas, places, torch.device("cpu"))
    for _ in range(min(n - place for n, place in zip(steps, places, strict=True))):
        here = table.sigmas.gather(1, table.step_index.unsqueeze(1)).squeeze(1).tolist()
        assert here == [float(own[place]) for own, place in zip(sigmas, places, strict=True)]
        table.advance()
        places = [place + 1 for place in places]
