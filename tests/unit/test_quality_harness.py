"""The harness's requests answered on top of an arm's cache, with and without the harness."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from mapper.capture.model import CapturedModel
from mapper.errors import BadTask, MissingExtra
from mapper.quality import arms, harness
from mapper.quality.reader import Reader
from tests.tiny_pair import say, write_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    folders = [write_model(root / name, n, n) for name, n in (("small", 2), ("large", 3))]
    return [CapturedModel(folder) for folder in folders], AutoTokenizer.from_pretrained(folders[1])


def prompted(pair, arm: arms.Arm, *, source: bool = False, tail: int = 4) -> harness.Prompted:
    models, tokenizer = pair
    foreign = models[0].prefill(torch.arange(7, 30))
    reader = Reader(*models, [arm], 1200, (foreign.k, foreign.v))
    return harness.Prompted(reader, tokenizer, tail, source=source)


def expected(model: CapturedModel, tokenizer, context: str, continuation: str) -> float:
    ids, more = (torch.tensor(tokenizer.encode(text)) for text in (context, continuation))
    with torch.inference_mode():
        logits = model.model(input_ids=torch.cat((ids, more))[None]).logits[0]
    logprobs = logits.float().log_softmax(-1)[len(ids) - 1 : -1]
    return float(logprobs.gather(1, more[:, None]).sum())


@pytest.mark.parametrize("source", [True, False])
def test_native_likelihoods_are_the_models_own(pair, source: bool) -> None:
    models, tokenizer = pair
    model = prompted(pair, arms.native(), source=source)
    generator = torch.Generator().manual_seed(0)
    for words in (1, 3, 30, 31):
        context, continuation = say(generator, words), say(generator, 3)
        for blank in (f"{context} ", context):
            found = model.likelihood(
                blank, continuation if blank.endswith(" ") else f" {continuation}"
            )
            own = expected(models[0 if source else 1], tokenizer, context, continuation)
            assert found.logprob == pytest.approx(own, abs=1e-3)
            assert found.tokens == 3


def test_another_cache_gives_another_likelihood(pair) -> None:
    zero = arms.Arm("zero", "control", arms._zero)
    context, continuation = say(torch.Generator().manual_seed(1), 40), "w3 w4"
    values = [
        prompted(pair, arm).likelihood(context, continuation).logprob
        for arm in (arms.native(), zero)
    ]
    assert abs(values[0] - values[1]) > 1e-3


def test_no_context_and_whole_texts(pair) -> None:
    models, tokenizer = pair
    model = prompted(pair, arms.native())
    text = say(torch.Generator().manual_seed(2), 600)
    words = text.split()
    pieces = [" ".join(words[:512]), " ".join(words[512:])]
    own = expected(models[1], tokenizer, "<s>", pieces[0])
    assert model.rolling(pieces[0]) == pytest.approx(own, abs=0.05)
    own += expected(models[1], tokenizer, *pieces)
    assert model.rolling(text) == pytest.approx(own, abs=0.05)
    assert model.likelihood("", "w1 w2").tokens == 2


def test_answers_end_where_the_harness_says(pair) -> None:
    model = prompted(pair, arms.native())
    context = say(torch.Generator().manual_seed(5), 30)
    whole = model.answer(context, (), 6)
    assert len(whole.split()) > 2
    second = whole.split()[1]
    assert model.answer(context, (f" {second}",), 6) == whole.split()[0]
    assert model.answer(context, (), 6) == whole


def test_a_context_longer_than_the_caches_loses_its_beginning(pair) -> None:
    model = prompted(pair, arms.native())
    context = say(torch.Generator().manual_seed(6), 1400)
    end = " ".join(context.split()[-1198:])
    assert model.likelihood(context, " w1 w2").logprob == pytest.approx(
        model.likelihood(end, " w1 w2").logprob, abs=1e-3
    )


def test_without_the_harness_the_remedy_is_named(pair, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MissingExtra, match="pip install lm-eval"):
        harness.as_lm(prompted(pair, arms.native()))
    with pytest.raises(MissingExtra, match="pip install lm-eval"):
        harness.manager(["piqa"], None)
    assert harness.manager([], None) is None


def test_requests_with_nothing_mapped_are_counted(pair) -> None:
    model = prompted(pair, arms.native(), tail=4)
    for context in ("w1 w2 w3", "w1 w2 w3 w4 w5", "w1 w2 w3 w4 w5 w6"):
        model.likelihood(context, " w7")
    assert (model.unmapped, model.requests) == (2, 3)


def test_an_answer_longer_than_the_caches_is_limited(pair) -> None:
    model = prompted(pair, arms.native())
    context = say(torch.Generator().manual_seed(6), 700)
    assert model.answer(context, ("w",), 32_768)


class _Request(SimpleNamespace):
    """What the harness hands over: an object with `args`."""


@pytest.mark.parametrize("real", [False, True])
def test_requests_of_the_harness(pair, monkeypatch, real: bool) -> None:
    if real and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is not installed")
    if not real:
        base = SimpleNamespace(LM=object)
        monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.api", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", base)
    own = prompted(pair, arms.native())
    model = harness.as_lm(own)
    pairs = [_Request(args=("w1 w2 w3", " w4")), _Request(args=("w5", " w6 w7"))]
    found = model.loglikelihood(pairs)
    assert [value for value, _ in found] == pytest.approx(
        [own.likelihood(*one.args).logprob for one in pairs]
    )
    assert model.loglikelihood_rolling([_Request(args=("w1 w2",))]) == [own.rolling("w1 w2")]
    options = {"until": ["\n"], "max_gen_toks": 3, "do_sample": False}
    assert model.generate_until([_Request(args=("w1 w2", options))]) == [
        own.answer("w1 w2", ("\n",), 3)
    ]


def test_local_tasks_through_the_harness(pair, tmp_path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(7)
    rows = [
        {
            "question": say(generator, 8),
            "choices": [say(generator, 1), say(generator, 2)],
            "label": 1,
        }
        for _ in range(6)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {data}\noutput_type: multiple_choice\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
        "metric_list:\n  - metric: acc\n"
    )
    models = {
        "native": prompted(pair, arms.native()),
        "identity": prompted(pair, arms.floors()[0]),
        "source alone": prompted(pair, arms.native(), source=True),
    }
    with pytest.raises(BadTask, match="no task"):
        harness.manager(["word"], tmp_path)
    manager = harness.manager(["words"], tmp_path)
    found = harness.evaluate(models, ["words"], manager, 6)
    assert found["native"]["words"]["acc,none"] == found["identity"]["words"]["acc,none"]
    assert "acc,none" in found["source alone"]["words"]
