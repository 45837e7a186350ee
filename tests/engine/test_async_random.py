"""Random arrivals, aborts and steps in every mode: each request ends once, in nobody else's way."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_fakes import MODES, FakeModel, make_engine, make_request, same_picture
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_diffusion.engine.async_engine import AsyncEngine
from offline_diffusion.errors import QueueFullError
from offline_diffusion.request import RequestOutput

MAX_AT_HAND = 4

shapes = st.fixed_dictionaries(
    {
        "height": st.sampled_from((16, 32)),
        "width": st.sampled_from((16, 48)),
        "num_inference_steps": st.integers(1, 5),
        "negative_prompt": st.sampled_from((None, "ugly")),
        "true_cfg_scale": st.sampled_from((1.0, 4.0)),
        "slo_ms": st.none() | st.sampled_from((1.0, 1e6)),
    }
)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), shapes),
        st.tuples(st.just("abort"), st.integers(0, 12)),
        st.tuples(st.just("step"), st.none()),
    ),
    max_size=40,
)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30)
@given(commands=commands, interval=st.none() | st.integers(1, 3))
def test_every_request_ends_once_and_with_its_own_picture(
    mode: str, commands: list[tuple[str, object]], interval: int | None
) -> None:
    options = MODES[mode]
    if interval is not None and options.get("step_execution", True):
        options = options | {"diffusion_streaming_output": True, "preview_interval": interval}
    engine = AsyncEngine(make_engine(FakeModel(), **options), max_num_requests=MAX_AT_HAND, threaded=False)
    outputs: list[RequestOutput] = []
    added, aborted = [], set()
    for command, value in commands:
        if command == "step":
            engine.step()
        elif command == "abort":
            engine.abort(str(value))
            aborted.add(str(value))
        else:
            request = make_request(str(len(added)), **value)  # type: ignore[arg-type]
            if engine.num_requests < MAX_AT_HAND:
                engine.add_request(request, outputs.append, timeout=0)
                added.append(request)
                aborted.discard(request.request_id)  # of none by that name so far
            else:
                with pytest.raises(QueueFullError):
                    engine.add_request(request, outputs.append, timeout=0)
        assert engine.num_requests <= MAX_AT_HAND
    while engine.num_requests:
        engine.step()
    assert not engine.engine.has_unfinished
    ends = [output for output in outputs if output.finished]
    assert Counter(o.request_id for o in ends) == Counter(r.request_id for r in added)
    for output in outputs:
        assert output.status in ("ok", "running") or output.request_id in aborted
        if output.status == "ok":
            assert same_picture(output.pixels, output.request)
            assert output.metrics.steps_run == output.request.num_inference_steps
    for request in added:  # nothing comes after the end
        own = [output.finished for output in outputs if output.request_id == request.request_id]
        assert own == sorted(own)
