"""What identifies a model's KV cache: shape, rotation, tokenizer, weights, dtype, page size.

A worker writes its `ModelSpec` beside its pages, a calibration writes both models'
specs into the artifact's manifest, and the mapper serves a pair only while the two
agree (`ModelSpec.differences`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from transformers import AutoConfig, PretrainedConfig

from mapper.errors import UnsupportedModel

# Bytes of each weight file that enter the digest: its whole safetensors header and
# this many blocks spread evenly over the tensors. Reading 140 GB at every worker
# start would cost minutes; a fine-tune or a re-quantisation changes every block.
_SAMPLED_BLOCKS = 256
_BLOCK_BYTES = 4096

KV_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelSpec(BaseModel):
    """Everything two KV caches must agree on, or a map must have been made for.

    `kv_heads` is the model's total over all tensor-parallel ranks. `rope` holds the
    normalised rotary parameters exactly as the model's own configuration states them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    architecture: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    rope: dict[str, Any]
    tokenizer_digest: str
    chat_template_digest: str
    weights_digest: str
    kv_dtype: str
    page_size: int

    @property
    def fingerprint(self) -> str:
        """16 hex digits naming the page directory; equal only for interchangeable caches."""
        identity = self.model_dump(mode="json", exclude={"name"})
        return _digest(json.dumps(identity, sort_keys=True).encode())[:16]

    @property
    def page_bytes(self) -> int:
        """Raw K and V bytes of one page over all layers and heads."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim
        return per_token * self.page_size * KV_DTYPES[self.kv_dtype]

    def differences(self, other: ModelSpec) -> list[str]:
        """Names of the fields in which the two caches are not interchangeable."""
        return [
            field
            for field in type(self).model_fields
            if field != "name" and getattr(self, field) != getattr(other, field)
        ]


def read_spec(folder: Path, *, name: str, kv_dtype: str, page_size: int) -> ModelSpec:
    """Reads the spec of a Hugging Face model folder.

    Raises:
        UnsupportedModel: sliding-window, hybrid, MLA or (in any layer) unrotated attention, an
            unknown KV dtype, or files missing from the folder; `field` names the cause.
    """
    folder = Path(folder)
    if kv_dtype not in KV_DTYPES:
        raise UnsupportedModel(
            "kv_dtype", f"{kv_dtype!r} cannot be mapped; use one of {', '.join(KV_DTYPES)}"
        )
    config = text_config(folder)
    refuse_unmappable(config)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return ModelSpec(
        name=name,
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        attention_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        rope=_plain(config.rope_parameters),
        tokenizer_digest=_tokenizer_digest(folder),
        chat_template_digest=_chat_template_digest(folder),
        weights_digest=_weights_digest(folder),
        kv_dtype=kv_dtype,
        page_size=page_size,
    )


def text_config(folder: Path) -> PretrainedConfig:
    """The language model's configuration, also of a multi-modal checkpoint."""
    if not (Path(folder) / "config.json").is_file():
        raise UnsupportedModel("config.json", f"not found in {folder}; expected a model folder")
    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()


def refuse_unmappable(config: PretrainedConfig) -> None:
    """Raises `UnsupportedModel` for attention whose cache is not one K and V per position."""
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel("kv_lora_rank", "MLA caches a latent, not keys and values")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(
            "sliding_window", f"a window of {window} tokens drops pages that a transfer needs"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel("layer_types", f"hybrid layers are not mappable: {sorted(kinds)}")
    if not getattr(config, "rope_parameters", None):
        raise UnsupportedModel("rope_parameters", "only rotary position embeddings can be undone")
    # 1 for a layer with rotary embedding, 0 for one without.
    rotated = (getattr(config, "no_rope_layers", None) or ())[: config.num_hidden_layers]
    unrotated = [layer for layer, one in enumerate(rotated) if not one]
    if unrotated:
        raise UnsupportedModel(
            "no_rope_layers",
            f"layers {unrotated} have no rotary embedding, and all keys would be rotated alike",
        )


def _tokenizer_digest(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel("tokenizer.json", f"not found in {folder}")
    content = json.loads(path.read_text(encoding="utf-8"))
    # Set by callers at run time; they do not change which ids a text gets.
    content.pop("padding", None)
    content.pop("truncation", None)
    return _digest(json.dumps(content, sort_keys=True).encode())


def _chat_template_digest(folder: Path) -> str:
    """Of the template's text: a copy saved by another version of Transformers has it in the other file."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return _digest(template.read_bytes())
    config = folder / "tokenizer_config.json"
    found = None
    if config.is_file():
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    # Several templates by name are a list.
    text = json.dumps(found, sort_keys=True) if isinstance(found, list | dict) else found or ""
    return _digest(text.encode())


def _weights_digest(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel("weights", f"no .safetensors file in {folder}")
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(size, 100_000_000):
                raise UnsupportedModel("weights", f"{path} is not a safetensors file")
            digest.update(struct.pack("<QQ", size, header_bytes) + file.read(header_bytes))
            start = 8 + header_bytes
            step = max((size - start) // _SAMPLED_BLOCKS, _BLOCK_BYTES)
            for offset in range(start, size, step):
                file.seek(offset)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _plain(value: Any) -> Any:
    """A JSON round trip, so that a spec equals itself after being read back."""
    return json.loads(json.dumps(value, sort_keys=True))
