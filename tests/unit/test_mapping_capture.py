"""Capture: what is read of a running model, and models of which it cannot be."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    Olmo2Config,
)

from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.stored import recognise, value_table
from mapper.errors import CalibrationError, UnsupportedModel
from tests.tiny_pair import write_model


def test_a_token_is_recognised_after_rounding(pair) -> None:
    model = CapturedModel(pair / "small")
    ids = torch.arange(5, 37)
    values = model.prefill(ids).v[0]
    table = value_table(model)
    assert torch.equal(recognise(table, values.bfloat16().float()), ids)
    assert not torch.equal(recognise(table, values.flip(1)), ids)


def write_other_model(folder, config) -> None:
    write_model(folder, 1, 0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("write", "field", "reason"),
    [
        (
            lambda folder: LlavaConfig(text_config=LlamaConfig(**TINY)).save_pretrained(folder),
            "architecture",
            "'llava' checkpoint",
        ),
        (
            lambda folder: write_other_model(folder, GPTNeoXConfig(**TINY)),
            "architecture",
            "layers.0.self_attn.o_proj",
        ),
        (
            lambda folder: write_other_model(folder, Olmo2Config(**TINY)),
            "k_norm",
            r"layer 0 of 'olmo2' has the shape \[32\]",
        ),
    ],
)
def test_models_whose_attention_cannot_be_captured_are_refused(
    tmp_path, write, field, reason
) -> None:
    write_model(tmp_path, 1, 0)
    write(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        CapturedModel(tmp_path)
    assert refused.value.field == field


def test_non_finite_activations_are_refused(pair) -> None:
    model = CapturedModel(pair / "large")
    with torch.no_grad():
        model.model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"non-finite values of the .* 'w3 w4 w5 w6'"):
        model.prefill(torch.arange(10, 14))


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


def test_slopes_are_those_of_the_log_likelihood(pair) -> None:
    """A layer whose output nothing reads has none; the others have."""
    model = CapturedModel(pair / "large")
    ids, at = torch.arange(1, 40), torch.tensor([5, 20, 38])
    slopes = model.sensitivity(ids, at)
    assert slopes.shape == (3, 3) and float(slopes.min()) > 0
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    assert float(model.sensitivity(ids, at).max()) == 0
