"""Calibration and evaluation from folder to folder on a tiny pair: choices, resumption, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mapper import calibrate
from mapper.artifact import Artifact
from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.pairs import StoredPair
from mapper.errors import CalibrationError, UnsupportedModel
from mapper.moments import Moments
from mapper.quality import evaluate

WORDS = [f"w{number}" for number in range(90)]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def write_model(folder, layers: int, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {
        word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", *WORDS])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def say(generator, words: int) -> str:
    return " ".join(WORDS[i] for i in torch.randint(0, 90, (words,), generator=generator).tolist())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_model(root / "small", 2, 0)
    write_model(root / "large", 3, 1)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": say(generator, 30)},
                {"role": "assistant", "content": say(generator, 20)},
            ],
            "split": "heldout" if number % 6 == 0 else "train",
        }
        for number in range(60)
    ]
    (root / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n\n\n".join(say(generator, 60) for _ in range(12))
    (root / "prose.txt").write_text(text)
    return root


def fit(pair, out: str, texts=("talks.jsonl", "prose.txt"), **options):
    paths = [pair / name for name in texts]
    return calibrate.run(pair / "small", pair / "large", paths, pair / out, **options)


def test_auto_distils_and_is_evaluated(pair, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET_SHARE", 0.4)
    out = fit(pair, "auto", method="auto", distill_seconds=2)
    manifest = Artifact.load(out).manifest
    distilled = manifest.selection["distilled"]
    assert distilled["steps"] > 3
    assert distilled["kept"] == (distilled["held_out_kl_after"] < distilled["held_out_kl_before"])
    assert manifest.calibration.skipped["of another split"] == 10
    assert manifest.sink_token_ids == [1]
    target = CapturedModel(pair / "large")
    assert manifest.parameters <= 0.4 * target.layer_parameters()

    report = evaluate.run(
        pair / "small",
        pair / "large",
        [out],
        pair / "talks.jsonl",
        pair / "report",
        conversations=4,
    )
    measured = report["dialogues"]
    assert measured["floor: identity"]["tail 1"]["kl"] == pytest.approx(0, abs=1e-6)
    assert measured["auto"]["tail 64"]["kl"] < measured["control: random map"]["tail 1"]["kl"]
    assert Artifact.load(out).manifest.quality["conversations"] == 4


def test_the_sink_table_is_the_targets_own_cache(pair) -> None:
    artifact = Artifact.load(fit(pair, "sink", method="head-local", k=1))
    target = CapturedModel(pair / "large")
    native = target.prefill(torch.tensor([1, 40, 41]))
    k, v = artifact.sink(1)
    assert torch.allclose(k, native.k[:, 0], atol=1e-6)
    assert torch.allclose(v, native.v[:, 0], atol=1e-6)


def test_two_halves_merged_equal_the_whole(pair) -> None:
    whole = Artifact.load(fit(pair, "whole", method="head-local", k=1))
    other = fit(pair, "prose", texts=("prose.txt",), method="head-local", k=1)
    halves = fit(
        pair, "halves", texts=("talks.jsonl",), method="head-local", k=1,
        merge=[calibrate.checkpoint_path(other)],
    )  # fmt: skip
    merged = Artifact.load(halves)
    assert merged.manifest.calibration.rows == whole.manifest.calibration.rows
    for ours, theirs in zip(merged.maps.k, whole.maps.k, strict=True):
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-4)


def test_a_finished_pass_is_resumed_without_running_the_models(pair, monkeypatch) -> None:
    first = Artifact.load(fit(pair, "again", method="head-local", k=1))
    before = Moments.load(calibrate.checkpoint_path(pair / "again"))
    seen = []
    capture = calibrate.capture
    monkeypatch.setattr(
        calibrate,
        "capture",
        lambda s, t, documents, *n: (seen.append(len(documents)), capture(s, t, documents, *n))[1],
    )
    second = Artifact.load(fit(pair, "again", method="head-local", k=1))
    assert seen[0] == 0 and before.rows == second.manifest.calibration.rows
    assert torch.equal(first.maps.v[2].weight, second.maps.v[2].weight)


def test_stored_pairs_add_rows(pair) -> None:
    models = [CapturedModel(pair / name) for name in ("small", "large")]
    ids = torch.tensor([1, *range(10, 42)])
    small, large = (model.prefill(ids) for model in models)
    stored = StoredPair((small.k, small.v), (large.k, large.v), torch.arange(33), ids)
    plain = Artifact.load(fit(pair, "without", method="head-local", k=1))
    added = Artifact.load(fit(pair, "with", method="head-local", k=1, stored=[stored]))
    assert added.manifest.calibration.rows == plain.manifest.calibration.rows + 32


def test_identity_only_for_a_model_onto_itself(pair) -> None:
    out = calibrate.run(pair / "large", pair / "large", [], pair / "same", method="identity")
    artifact = Artifact.load(out)
    k, v = torch.randn(2, 3, 5, 2, 8)
    assert torch.equal(artifact.compile().apply(k, v, torch.arange(5))[1], v)
    with pytest.raises(UnsupportedModel, match="itself"):
        calibrate.run(pair / "small", pair / "large", [], pair / "no", method="identity")


def test_too_little_text_is_refused_before_the_pass(pair, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "accumulate", lambda *a: pytest.fail("the pass was started"))
    with pytest.raises(CalibrationError, match="more text"):
        fit(pair, "little", method="all-head", k=2, tokens=20, stride=2)


def test_non_finite_activations_are_refused(pair) -> None:
    model = CapturedModel(pair / "large")
    with torch.no_grad():
        model.model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="non-finite values"):
        model.prefill(torch.arange(1, 9))


def test_a_captured_query_reproduces_the_models_attention(pair) -> None:
    """q . k of a captured query with the cache gives the attention that the model computes."""
    model = CapturedModel(pair / "large")
    ids = torch.arange(1, 40)
    prefill = model.prefill(ids, torch.tensor([38]))
    outputs = []
    hook = model.model.model.layers[2].self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: outputs.append(inputs[0][0, -1])
    )
    with torch.no_grad():
        model.model(
            input_ids=ids[None, -1:],
            past_key_values=build_cache(prefill.k[:, :-1], prefill.v[:, :-1]),
        )
    hook.remove()
    query, k, v = prefill.queries[2, 0], prefill.k[2], prefill.v[2]
    weights = torch.einsum("hgd,nhd->hgn", query.view(2, 2, 8), k).softmax(-1)
    ours = torch.einsum("hgn,nhd->hgd", weights, v).flatten()
    assert torch.allclose(ours, outputs[0], atol=1e-5)
