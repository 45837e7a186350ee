"""Which prompts share a batch, what happens to them when it fails, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from engine_fakes import Clock, FakeModel, make_engine, make_request, same_picture

from offline_diffusion.engine.prompt_cache import PromptCache
from offline_diffusion.models.base import TokenizedPrompt

LONG = "more than ten"


@pytest.fixture
def model() -> FakeModel:
    """Encodes four prompts together; those of at most ten characters are of one shape."""
    return FakeModel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(model: FakeModel, clock: Clock) -> PromptCache:
    return PromptCache(model, clock)


def tokenize(texts: Iterable[str]) -> list[TokenizedPrompt]:
    return [FakeModel().tokenize(text) for text in texts]


def get(cache: PromptCache, *texts: str) -> list[str]:
    """The texts that the encoded prompts stand for."""
    encoded, _ = cache.get(tokenize(texts))
    return ["".join(chr(round(float(value) * 100)) for value in own.stream) for own in encoded]


def fail_on(text: str) -> Callable[[str], None]:
    def check(own: str) -> None:
        if own == text:
            raise ValueError(f"cannot encode {own}")

    return check


# --- batches ----------------------------------------------------------------------------------------


def test_a_batch_is_filled_up_with_what_was_expected_first(cache: PromptCache, model: FakeModel) -> None:
    cache.expect(tokenize("abcdefg"))
    assert model.encode_calls == []
    assert get(cache, "e") == ["e"]
    assert model.encode_calls == [["e", "a", "b", "c"]]
    assert get(cache, "a", "c") == ["a", "c"]
    assert len(model.encode_calls) == 1
    get(cache, "d")
    assert model.encode_calls[1:] == [["d", "f", "g"]]


def test_only_prompts_of_the_wanted_shapes_are_taken_along(cache: PromptCache, model: FakeModel) -> None:
    cache.expect(tokenize([LONG, "a", "b"]))
    get(cache, "c")
    assert model.encode_calls == [["c", "a", "b"]]
    cache.expect(tokenize(["d", "e"]))
    get(cache, LONG)
    assert model.encode_calls[1:] == [[LONG]]


def test_full_batches_take_nothing_along(cache: PromptCache, model: FakeModel) -> None:
    cache.expect(tokenize("xyz"))
    get(cache, *"abcd")
    assert model.encode_calls == [["a", "b", "c", "d"]]


def test_both_branches_are_one_batch_and_equal_ones_one_prompt(cache: PromptCache, model: FakeModel) -> None:
    assert get(cache, "a", "b") == ["a", "b"]
    assert get(cache, "c", "c") == ["c", "c"]
    assert model.encode_calls == [["a", "b"], ["c"]]


def test_what_was_encoded_or_called_off_is_not_expected(cache: PromptCache, model: FakeModel) -> None:
    get(cache, "a")
    cache.expect(tokenize("ab"))
    cache.forget_expected()
    cache.expect(tokenize("ac"))
    get(cache, "d")
    assert model.encode_calls == [["a"], ["d", "c"]]


def test_an_engine_encodes_in_full_batches_and_draws_the_same(model: FakeModel) -> None:
    requests = [make_request(name, name, negative_prompt="x", true_cfg_scale=2.0) for name in "abcdefg"]
    outputs = list(make_engine(model, max_num_seqs=1).generate(requests))
    assert [len(call) for call in model.encode_calls] == [4, 4]
    assert all(same_picture(output.pixels, output.request) for output in outputs)


def test_between_two_steps_at_most_one_shape_and_branch_is_encoded_ahead(model: FakeModel) -> None:
    """The step must not wait for more than the prompts of one request."""
    counts: list[int] = []
    model.on_denoise = lambda batch: counts.append(len(model.encode_calls))
    requests = [make_request(str(n), "x" * (1 + 10 * n), num_inference_steps=8) for n in range(4)]
    list(make_engine(model, max_num_seqs=1, scheduling_policy="fifo").generate(requests))
    assert counts[0] == 1
    assert max(later - earlier for earlier, later in pairwise(counts)) == 1


def test_requests_that_were_dropped_are_not_encoded_later(model: FakeModel) -> None:
    engine = make_engine(model, max_num_seqs=1, scheduling_policy="fifo")
    model.encode_rows = 2
    outputs = engine.generate([make_request(name, name) for name in "abcdefghijkl"])
    next(outputs)
    outputs.close()
    dropped = set("abcdefghijkl") - set(model.encoded)
    assert dropped
    list(engine.generate([make_request("new", "n"), make_request("newer", "m")]))
    assert not dropped & set(model.encoded)


# --- failures ---------------------------------------------------------------------------------------


def test_company_that_fails_costs_nobody_else_anything(cache: PromptCache, model: FakeModel) -> None:
    model.on_encode = fail_on("b")
    cache.expect(tokenize("abcde"))
    assert get(cache, "a") == ["a"]
    with pytest.raises(ValueError, match="cannot encode b"):
        get(cache, "b")
    assert get(cache, "c", "e") == ["c", "e"]
    assert model.encode_calls == [["a", "b", "c", "d"], ["a"], ["b"], ["e"], ["c"]]


def test_a_prompt_that_fails_alone_is_tried_once(cache: PromptCache, model: FakeModel) -> None:
    model.on_encode = fail_on("a")
    with pytest.raises(ValueError, match="cannot encode a"):
        get(cache, "a")
    assert model.encode_calls == [["a"]]


def test_a_failed_branch_leaves_the_other_to_the_next_request(cache: PromptCache, model: FakeModel) -> None:
    model.on_encode = fail_on("a")
    with pytest.raises(ValueError, match="cannot encode a"):
        get(cache, "a", "negative")
    assert get(cache, "b", "negative") == ["b", "negative"]


def test_after_clearing_prompts_go_together_again(cache: PromptCache, model: FakeModel) -> None:
    model.on_encode = fail_on("b")
    cache.expect(tokenize("ab"))
    get(cache, "a")
    cache.clear()
    model.on_encode = fail_on("nothing")
    assert get(cache, "a", "b") == ["a", "b"]
    assert model.encode_calls == [["a", "b"], ["a"], ["a", "b"]]


# --- what is kept -----------------------------------------------------------------------------------


def test_time_is_shared_and_booked_once(cache: PromptCache, model: FakeModel, clock: Clock) -> None:
    def take_time(_: str) -> None:
        clock.now += 2.5

    model.on_encode = take_time
    cache.expect(tokenize("abcd"))
    seconds = [cache.get(tokenize(own))[1] for own in ("a", "ab", "cd", "ad")]
    assert seconds == [2.5, 2.5, 5.0, 0.0]


def test_the_least_recently_used_go_first(
    cache: PromptCache, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline_diffusion.engine.prompt_cache.PROMPT_CACHE_TOKENS", 5)
    get(cache, "aa")
    get(cache, "bb")
    get(cache, "aa")
    get(cache, "cc")  # six tokens: bb goes
    assert get(cache, "aa", "bb", LONG) == ["aa", "bb", LONG]  # far too many, and still what was asked for
    assert model.encoded == {"aa": 1, "bb": 2, "cc": 1, LONG: 1}
    get(cache, LONG)
    assert model.encoded[LONG] == 1


def test_clearing_lets_go_of_everything_encoded(cache: PromptCache, model: FakeModel) -> None:
    get(cache, "a", "b")
    cache.clear()
    assert torch.equal(cache.get(tokenize("a"))[0][0].stream, torch.tensor([[0.97]]))
    assert model.encode_calls == [["a", "b"], ["a"]]


def test_aborted_requests_are_not_encoded_for_nobody(model: FakeModel) -> None:
    engine = make_engine(model, max_num_seqs=1, scheduling_policy="fifo")
    for name in ("a", "b", "c"):
        engine.add_request(make_request(name, name))
    engine.abort("b")
    while engine.has_unfinished:
        engine.step()
    assert set(model.encoded) == {"a", "c"}


def test_a_failed_batch_is_forgotten_once_its_prompts_were_served(model: FakeModel) -> None:
    cache = PromptCache(model, Clock())
    bad = model.tokenize("bad")

    def on_encode(text: str) -> None:
        if text == "bad":
            raise ValueError("bad")

    model.on_encode = on_encode
    good = model.tokenize("g")
    cache.expect([good])
    with pytest.raises(ValueError, match="bad"):
        cache.get([bad])
    cache.get([good])
    assert not cache._alone
