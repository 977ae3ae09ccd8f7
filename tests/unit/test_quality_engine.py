"""Many caches at once give what one model, run on its own, gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from mapper.capture.model import CapturedModel
from mapper.errors import UnsupportedModel
from mapper.methods.base import AffineMap, CacheMap, KVMap
from mapper.quality import arms, reuse
from mapper.quality.batch import CacheBatch
from mapper.quality.reader import Reader
from mapper.quality.scoring import Continuation, _ended, score, speak
from tests.tiny_pair import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [
        CapturedModel(write_model(root / name, layers, seed))
        for name, layers, seed in (("small", 2, 0), ("large", 3, 1), ("sibling", 3, 2))
    ]


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(7, 97, (count,), generator=torch.Generator().manual_seed(seed))


def plain_logprobs(model: CapturedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)


def cached(model: CapturedModel, tokens: torch.Tensor, rows: int = 1) -> CacheBatch:
    batch = CacheBatch(model, rows, 128)
    prefill = model.prefill(tokens)
    for row in range(rows):
        batch.write(row, 0, prefill.k, prefill.v)
    return batch


def reader_of(models, *others: arms.Arm) -> Reader:
    foreign = models[0].prefill(ids(20, 9))
    return Reader(*models[:2], [arms.native(), *others], 128, (foreign.k, foreign.v))


def test_continuing_a_written_cache_is_the_model_itself(models) -> None:
    tokens = ids(40)
    batch = cached(models[1], tokens[:30], rows=3)
    hidden = batch.run(tokens[30:], 30, slice(1, 3))
    expected = plain_logprobs(models[1], tokens)[30:]
    assert hidden.shape[0] == 2
    for row in hidden:
        assert torch.allclose(batch.logprobs(row), expected, atol=1e-4)
    k, v = batch.read(0, 40, row=1)
    own = models[1].prefill(tokens)
    assert torch.allclose(k, own.k, atol=1e-4) and torch.allclose(v, own.v, atol=1e-4)


def test_a_prompt_longer_than_the_caches_is_an_error(models) -> None:
    with pytest.raises(ValueError, match="caches of 128"):
        CacheBatch(models[1], 1, 128).run(ids(129), 0)


def test_continuations_side_by_side_do_not_see_each_other(models) -> None:
    tokens, options = ids(40), [ids(n, n) for n in (1, 2, 5)]
    batch = cached(models[1], tokens[:35], rows=2)
    found = score(batch, tokens[35:], 35, [Continuation(option) for option in options])
    assert len(found) == 2
    for option, one in zip(options, found[1], strict=True):
        logprobs = plain_logprobs(models[1], torch.cat((tokens, option)))[39:-1]
        assert one.logprob == pytest.approx(
            float(logprobs.gather(1, option[:, None]).sum()), abs=1e-3
        )
        assert one.tokens == len(option)
        assert one.greedy == bool((logprobs.argmax(-1) == option).all())


def test_given_tokens_of_a_continuation_are_not_judged(models) -> None:
    tokens, option = ids(40), ids(6, 3)
    batch = cached(models[1], tokens[:39])
    (((whole, rest),),) = [
        score(batch, tokens[39:], 39, [Continuation(option), Continuation(option, 4)])
    ]
    logprobs = plain_logprobs(models[1], torch.cat((tokens, option)))[43:-1]
    assert rest.logprob == pytest.approx(
        float(logprobs.gather(1, option[4:, None]).sum()), abs=1e-3
    )
    assert rest.tokens == 2 and rest.logprob > whole.logprob


def test_greedy_answers_are_those_of_the_model(models, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "m", 3, 1))
    tokens = ids(40)
    expected = tokens
    while expected[-1] != tokenizer.eos_token_id and len(expected) < 80:
        expected = torch.cat((expected, plain_logprobs(models[1], expected)[-1:].argmax(-1)))
    length = len(expected) - 41
    # This model ends its answer by itself, and not at once: both ends can be tested.
    assert 2 < length < 39
    text = tokenizer.decode(expected[40:-1])
    for limit in (length, length + 2):
        batch = cached(models[1], tokens[:30], 2)
        for one in speak(batch, tokenizer, tokens[30:], 30, limit=limit, stops=()):
            assert one.text == text and one.cut == (limit == length)
    second = text.split()[1]
    (one,) = speak(
        cached(models[1], tokens[:30]), tokenizer, tokens[30:], 30, limit=8, stops=(f" {second}",)
    )
    assert one.text == text.split()[0] and not one.cut


def test_a_stop_that_an_answer_begins_with_counts_where_it_comes_again() -> None:
    spoken = SimpleNamespace(eos_token_id=0, decode=lambda ids: " ".join("xab"[i] for i in ids))
    assert _ended([1, 2, 1], spoken, ("a",)).text == "a b"
    assert _ended([1, 2], spoken, ("a",)) is None


def test_what_prompts_share_is_computed_once_and_stays_right(models) -> None:
    """Loading prompts one after another gives what loading each into a fresh reader gives."""
    shared, seen = ids(30), []
    counting = arms.Arm(
        "count", "variant", lambda span: seen.append(len(span.positions)) or span.native
    )
    rounded = arms.floors()[1]
    reader = reader_of(models, counting, rounded)
    prompts = [torch.cat((shared, torch.full((1,), n), ids(n, n))) for n in (11, 4, 19)]
    for prompt in prompts:
        reader.load(prompt)
        reader.batch.run(ids(4, 5), len(prompt) - 3)
        reader.source.run(ids(4, 5), len(prompt) - 3)
        reader.keep(len(prompt) - 3)
    reader.load(prompts[0])
    assert seen == [42, 5, 20, 12]
    fresh = reader_of(models, counting, rounded)
    fresh.load(prompts[0])
    for row in range(3):
        for again, once in zip(
            reader.batch.read(0, 42, row), fresh.batch.read(0, 42, row), strict=True
        ):
            assert torch.allclose(again, once, atol=1e-4)
    for again, once in zip(reader.source.read(0, 42), fresh.source.read(0, 42), strict=True):
        assert torch.allclose(again, once, atol=1e-4)


@pytest.mark.parametrize("keys_read", [(0, 1), (0, 3)])
def test_a_map_gives_a_position_the_same_whatever_was_loaded_before(models, keys_read) -> None:
    """Prompts that share a beginning: the rest is mapped at its own positions, after what it looks back to."""
    generator = torch.Generator().manual_seed(4)
    maps = CacheMap(
        *(
            [
                AffineMap(read, torch.randn(2, 16, 8, generator=generator), torch.zeros(2, 8))
                for _ in range(3)
            ]
            for read in (keys_read, (0, 1))
        )
    )
    kv_map = KVMap(maps, *(model.rotary for model in models[:2]), source_layers=2)
    assert kv_map.looks_back == (3 in keys_read)
    mapped = arms.Arm("mapped", "variant", arms._mapped(kv_map))
    prompt = ids(90)
    reader = reader_of(models, mapped)
    for tokens in (50, 90):
        reader.load(prompt[:tokens])
    once = kv_map.apply(
        *(models[0].prefill(prompt).k, models[0].prefill(prompt).v), torch.arange(90)
    )
    for found, expected in zip(reader.batch.read(0, 90, 1), once, strict=True):
        assert torch.allclose(found[:, 1:], expected[:, 1:], atol=1e-4)


def test_floors_and_controls_are_what_they_say(models) -> None:
    identity, rounded, splice = arms.floors()
    zero = arms.Arm("zero", "control", arms._zero)
    mapped_sink = arms.Arm("sink", "comparator", arms._zero, maps_sink=True)
    foreign = arms.Arm("foreign", "control", lambda span: tuple(p[[0, 1, 1]] for p in span.foreign))
    reader = reader_of(models, identity, rounded, splice, zero, mapped_sink, foreign)
    reader.load(ids(100))
    own = reader.native.read(0, 100)
    k = [reader.batch.read(0, 100, row)[0] for row in range(7)]
    assert torch.equal(k[1], own[0])
    assert 0 < (k[2] - own[0]).abs().max() < 0.1
    assert torch.allclose(k[3], own[0], atol=1e-4)
    assert torch.equal(k[4][:, 0], own[0][:, 0]) and not k[4][:, 1:].any()
    assert not k[5].any()
    other = models[0].prefill(ids(20, 9)).k
    assert torch.allclose(k[6][0, 1:20], other[0, 1:], atol=1e-5)
    # Further on the same keys once more, turned to where they stand now, and no second attention sink.
    undo = models[0].rotary.undo
    again, once = (
        undo(part, torch.arange(at, at + 19))[0]
        for part, at in ((k[6][:1, 20:39], 20), (other[:1, 1:], 1))
    )
    assert torch.allclose(again, once, atol=1e-4)


def test_layer_reuse_of_equal_models_and_of_all_layers_is_exact(models) -> None:
    large, sibling = models[1], models[2]
    tokens = ids(30)
    native = large.prefill(tokens)
    k, v = reuse.recompute(large, large, tokens, range(1, 3))
    assert torch.allclose(k, native.k[1:], atol=1e-4) and torch.allclose(v, native.v[1:], atol=1e-4)
    foreign = (native.k, native.v)
    whole = reuse.recomputing(sibling, large, range(0, 3))
    part = reuse.recomputing(sibling, large, range(2, 3))
    reader = Reader(sibling, large, [arms.native(), whole, part], 128, foreign)
    reader.load(tokens)
    # The first layer's input is the embedding, which the two models do not share.
    assert torch.allclose(
        reader.batch.read(0, 30, 2)[0][:2, 1:], sibling.prefill(tokens).k[:2, 1:], atol=1e-4
    )
    assert not torch.allclose(
        reader.batch.read(0, 30, 2)[0][2, 1:], sibling.prefill(tokens).k[2, 1:]
    )


def test_layer_reuse_between_different_architectures_is_refused(models) -> None:
    with pytest.raises(UnsupportedModel, match="layers: selective layer reuse"):
        reuse.recomputing(models[0], models[1], range(1))
