"""One trace on one engine after the other: modes and policies side by side. Free of torch."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from offline_diffusion.bench.energy import JOULES, energy_meter
from offline_diffusion.bench.metrics import slo_unit_ms, summarize
from offline_diffusion.bench.records import DEFAULT_NUM_WARM_UPS, DEFAULT_SLO_SCALE, Replayed
from offline_diffusion.bench.replay import Clock, Replay, ReplayEngine, ReplayRequest, WallClock
from offline_diffusion.bench.report import Run
from offline_diffusion.bench.simulate import SimulatedClock, SimulatedEngine
from offline_diffusion.config import EngineConfig, make_options
from offline_diffusion.data.rows import RowImages
from offline_diffusion.errors import ConfigError
from offline_diffusion.models.capabilities import Capabilities
from offline_diffusion.models.modes import check_mode

if TYPE_CHECKING:
    from offline_diffusion.engine.cost import CostModel, MeasuredCost

MODEL_OPTIONS = ("model", "revision", "device", "dtype", "attention_backend", "quantization")
"""Options of an engine that its model is loaded with."""

CHECKPOINT_OPTIONS = ("model", "revision")
"""Of these, those that say which model it is."""

WARM_UP_STEPS = 2
FIRST_WARM_UP_ROW = 10**12
"""No trace has so many rows."""

Observer = Callable[[str, int], None]
"""Hears the name of a run, and how many of its requests are done."""


@dataclass
class Session:
    """How a trace is replayed, the same for all runs.

    Args:
        requests: In order of arrival.
        closed_loop, max_concurrency: See `replay.Replay`.
        slo_scale: Requests without an SLO get so many times what is expected of their size and steps:
            vLLM-Omni's rule.
        slo_unit_ms: What is expected of a unit of work; None takes it from the warm-up of the first run.
        num_warm_ups: Requests before each run, of different sizes, one after the other, with
            `WARM_UP_STEPS` steps.
        stopped: Asked between steps whether to end.
        observer: Hears how far a run is.
    """

    requests: Sequence[ReplayRequest]
    closed_loop: bool = False
    max_concurrency: int | None = None
    slo_scale: float = DEFAULT_SLO_SCALE
    slo_unit_ms: float | None = None
    num_warm_ups: int = DEFAULT_NUM_WARM_UPS
    stopped: Callable[[], bool] = lambda: False
    observer: Observer = lambda _name, _count: None

    def replay(
        self,
        name: str,
        options: Mapping[str, Any],
        engine: ReplayEngine,
        clock: Clock,
        joules: JOULES | None = None,
    ) -> Run:
        """Warms ``engine`` up and replays the trace on it."""
        return self.finish(name, options, self._replay(name, engine, clock, self.requests, joules))

    def finish(self, name: str, options: Mapping[str, Any], replayed: Replayed) -> Run:
        """A run with its numbers."""
        return Run(name, options, replayed, summarize(replayed, slo_scale=self.slo_scale))

    def _replay(
        self,
        name: str,
        engine: ReplayEngine,
        clock: Clock,
        requests: Sequence[ReplayRequest],
        joules: JOULES | None = None,
    ) -> Replayed:
        warm_ups = warm_ups_of(self.requests, self.num_warm_ups)
        warm = Replay(engine, clock, closed_loop=True, max_concurrency=1).run(warm_ups)
        if self.slo_unit_ms is None:
            self.slo_unit_ms = slo_unit_ms(warm.records)
        engine.reset_peak_memory()  # or the memory of an earlier run counts, and of measuring the budget
        replay = Replay(
            engine,
            clock,
            closed_loop=self.closed_loop,
            max_concurrency=self.max_concurrency,
            stopped=self.stopped,
            observer=lambda count: self.observer(name, count),
        )
        before = joules() if joules is not None else 0.0
        replayed = replay.run(with_slos(requests, self.slo_unit_ms, self.slo_scale))
        if joules is not None:
            replayed.energy_j = joules() - before
        return replayed

    def real_runs(
        self,
        modes: Mapping[str, EngineConfig],
        *,
        load: Callable[[EngineConfig], Any] | None = None,
        on_cost: Callable[[str, MeasuredCost, EngineConfig], None] = lambda _name, _cost, _config: None,
    ) -> Iterator[Run]:
        """A run for each mode on this machine.

        A model is loaded anew only for other options of its own, and its token budget is measured once.

        Args:
            modes: Name → engine options.
            load: Replaces the loading of the model.
            on_cost: Gets what a run's steps cost, where it tells enough.
        """
        from offline_diffusion.engine.cost import measured_cost
        from offline_diffusion.engine.engine import Engine
        from offline_diffusion.models.loader import load_model

        model: Any = None
        last: EngineConfig | None = None
        budget: int | None = None
        for name, config in modes.items():
            if last is None or _model_options(config) != _model_options(last):
                model, budget = None, None
                gc.collect()  # two models at once may not fit
                model = (load or load_model)(config)
                check_modes(modes, model.capabilities)
            last = config
            engine = Engine(model, _with_budget(config, budget))
            budget = budget or engine.scheduler.max_num_batched_tokens
            on_gpu = model.device.type == "cuda"
            joules = energy_meter(model.device.index or 0) if on_gpu else None
            run = self.replay(name, options_of(config), engine, WallClock(), joules)
            if (cost := measured_cost(engine)) is not None:
                on_cost(name, cost, config)
            del engine
            gc.collect()
            yield run
            if self.stopped():
                return

    def simulated_runs(
        self,
        modes: Mapping[str, EngineConfig],
        capabilities: Capabilities,
        cost: CostModel,
        max_num_batched_tokens: int,
        num_replicas: int = 1,
    ) -> Iterator[Run]:
        """A run for each mode through a cost model.

        Args:
            modes: Name → engine options.
            capabilities: Of the model.
            cost: What things take.
            max_num_batched_tokens: Where the options say nothing.
            num_replicas: Engines that are dealt the requests in turn, each with a queue of its own.
        """
        check_modes(modes, capabilities)
        for name, config in modes.items():
            parts = []
            for replica in range(num_replicas):
                clock = SimulatedClock()
                engine = SimulatedEngine(capabilities, config, cost, clock, max_num_batched_tokens)
                parts.append(self._replay(name, engine, clock, self.requests[replica::num_replicas]))
            yield self.finish(name, options_of(config), joined(parts))
            if self.stopped():
                return


def check_modes(modes: Mapping[str, EngineConfig], capabilities: Capabilities) -> None:
    """Refuses all runs when the family cannot do one of them.

    Raises:
        ConfigError: With the mode and the reason.
    """
    for name, config in modes.items():
        try:
            check_mode(config, capabilities)
        except ConfigError as error:
            raise ConfigError(f"mode {name}: {error.message}", hint=error.hint) from None


def warm_ups_of(requests: Sequence[ReplayRequest], count: int) -> list[ReplayRequest]:
    """One image of each of the first ``count`` sizes, with a prompt that no other has and few steps."""
    by_size: dict[tuple[int, int], ReplayRequest] = {}
    for request in requests:
        if len(by_size) >= count:
            break
        asked = request.images.first.request
        by_size.setdefault((asked.height, asked.width), request)
    warm_ups = []
    for row, request in enumerate(by_size.values(), start=FIRST_WARM_UP_ROW):
        task, asked = request.images.first, request.images.first.request
        steps = min(WARM_UP_STEPS, asked.num_inference_steps)
        own = replace(asked, prompt=f"warm-up {row}: {asked.prompt}", num_inference_steps=steps)
        images = RowImages(replace(task, row=row, request=own), count=1)
        warm_ups.append(ReplayRequest(images, 0.0, None, f"warm-up-{row}"))
    return warm_ups


def with_slos(requests: Sequence[ReplayRequest], unit_ms: float | None, scale: float) -> list[ReplayRequest]:
    """``requests``; those without an SLO get ``scale`` times the latency that is expected of them."""
    return [
        request
        if unit_ms is None or request.slo_ms is not None
        else replace(request, slo_ms=unit_ms * request.record().work_units * scale)
        for request in requests
    ]


def joined(parts: Sequence[Replayed]) -> Replayed:
    """What several engines did side by side."""
    if len(parts) == 1:
        return parts[0]
    return Replayed(
        sorted((record for part in parts for record in part.records), key=lambda record: record.arrival),
        sorted((span for part in parts for span in part.spans), key=lambda span: span.start),
        duration=max(part.duration for part in parts),
        device_s=math.fsum(part.device_s for part in parts),
        num_unfinished=sum(part.num_unfinished for part in parts),
        num_devices=len(parts),
    )


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Options that are not as by default."""
    fields = EngineConfig.model_fields
    return {
        name: value
        for name in fields
        if (value := getattr(config, name)) != fields[name].default and name != "model"
    }


def modes_of(base: EngineConfig, named: Mapping[str, Any], source: str) -> dict[str, EngineConfig]:
    """Engine options by the name of a mode: those of ``base``, with what the mode says in their place.

    Args:
        base: From the command line.
        named: Name → options of the engine.
        source: Where they come from, for the message.

    Raises:
        ConfigError: A mode is no mapping of options, a value is not allowed, or it names another model.
    """
    modes = {}
    common = {name: getattr(base, name) for name in EngineConfig.model_fields}
    for name, own in named.items():
        if not isinstance(own, dict | None):
            raise ConfigError(f"{source}: {name} must hold a mapping of engine options, got {own!r}")
        given = {str(key).replace("-", "_"): value for key, value in (own or {}).items()}
        if other := [key for key in CHECKPOINT_OPTIONS if key in given]:
            raise ConfigError(
                f"{source}: {name}: {other[0]} is the same for all modes: a replay is of one model",
                hint="give it on the command line, and replay once a model",
            )
        modes[name] = make_options(EngineConfig, {**common, **given}, source=f"{source}: {name}")
    if not modes:
        raise ConfigError(f"{source}: names no mode", hint="such as: packed: {scheduling_policy: pack}")
    return modes


def check_one_cost(modes: Mapping[str, EngineConfig], base: EngineConfig) -> None:
    """Refuses to simulate a mode whose model is loaded otherwise than ``base`` says: that has its own cost.

    Raises:
        ConfigError: With the mode and the option.
    """
    for name, config in modes.items():
        for option in MODEL_OPTIONS:
            if (value := getattr(config, option)) != getattr(base, option):
                raise ConfigError(
                    f"mode {name}: {option} {value} cannot be simulated beside others, which cost otherwise",
                    hint=f"simulate it by itself, with --{option.replace('_', '-')} {value}",
                )


def _with_budget(config: EngineConfig, budget: int | None) -> EngineConfig:
    if budget is None or config.max_num_batched_tokens is not None:
        return config
    return config.model_copy(update={"max_num_batched_tokens": budget})


def _model_options(config: EngineConfig) -> list[Any]:
    return [getattr(config, name) for name in MODEL_OPTIONS]
