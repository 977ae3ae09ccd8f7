"""A model run for its cache: keys and values as cached, and the queries that will read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mapper.errors import CalibrationError, UnsupportedModel
from mapper.rotary import Rotary
from mapper.spec import ModelSpec, read_spec, text_config

_RECORDING = "baton_recording_sdpa"
# Tokens of a document that an error quotes: past the system message that a chat template may add.
_OPENING = 48


@dataclass(frozen=True)
class Prefill:
    """One document's cache. k, v [layers, tokens, kv_heads, head_dim] as cached (k rotated).

    `queries` [layers, sampled, attention_heads, head_dim] are those that the model itself
    used at `query_positions` [sampled]: rotated, with any scaling of the architecture, and
    multiplied by the softmax scale, so that q . k is the attention logit.
    """

    k: torch.Tensor
    v: torch.Tensor
    queries: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None


class CapturedModel:
    """A Hugging Face model folder, loaded for inference, with its spec and rotation."""

    def __init__(
        self,
        folder: Path,
        *,
        spec: ModelSpec | None = None,
        page_size: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Raises:
            UnsupportedModel: its cache cannot be mapped, or it has no decoder layers whose
                attention can be captured; `field` names the cause.
        """
        self.folder = Path(folder)
        config = text_config(folder)
        self.spec = spec or read_spec(
            folder, name=Path(folder).name, kv_dtype="float32", page_size=page_size
        )
        self.rotary = Rotary(config)
        _refuse_unknown(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation=_RECORDING
        ).eval()
        self.model.requires_grad_(False)
        self._refuse_other_layers()

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, query_positions: torch.Tensor | None = None) -> Prefill:
        """Runs `ids` [tokens] from position 0 and returns its cache.

        Raises:
            CalibrationError: a key, value or query is not finite.
        """
        recorder = None if query_positions is None else _Recorder(query_positions)
        cache = DynamicCache(config=self.model.config)
        self.model.base_model(
            input_ids=ids[None], past_key_values=cache, use_cache=True, query_recorder=recorder
        )
        k, v = stack_cache(cache)
        queries = torch.stack(recorder.queries) if recorder else None
        for name, tensor in (("keys", k), ("values", v), ("queries", queries)):
            if tensor is not None and not torch.isfinite(tensor).all():
                raise CalibrationError(
                    f"{self.spec.name} gives non-finite {name} of the document that begins "
                    f"{self._opening(ids)!r}: load it in a wider dtype, or take the document out"
                )
        return Prefill(k, v, queries, query_positions)

    @torch.enable_grad()
    def sensitivity(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """How much the next tokens depend on each layer's attention output after W_O: the squared
        gradient of sampled tokens' log-likelihood, [layers, positions]."""
        outputs: list[torch.Tensor] = []

        def keep(module, inputs, output):
            # Weights are frozen: the first layer's output begins the graph.
            output = output if output.requires_grad else output.requires_grad_()
            output.retain_grad()
            outputs.append(output)
            return output

        layers = self.model.base_model.layers
        hooks = [layer.self_attn.o_proj.register_forward_hook(keep) for layer in layers]
        try:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            for hook in hooks:
                hook.remove()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
        logits.log_softmax(-1).gather(1, drawn).sum().backward()
        return torch.stack([output.grad[0, positions].square().sum(-1) for output in outputs])

    def output_projection(self, layer: int) -> torch.Tensor:
        """W_O of one layer, [hidden_size, attention_heads * head_dim]."""
        return self.model.base_model.layers[layer].self_attn.o_proj.weight

    def layer_parameters(self) -> int:
        """Weights of all decoder layers: half the arithmetic of prefilling one token."""
        return sum(weight.numel() for weight in self.model.base_model.layers.parameters())

    def key_norm(self, layer: int) -> torch.Tensor | None:
        """The gain [head_dim] of the layer's k_norm, or None when the model has none."""
        norm = getattr(self.model.base_model.layers[layer].self_attn, "k_norm", None)
        return None if norm is None else norm.weight

    def _opening(self, ids: torch.Tensor) -> str:
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        return tokenizer.decode(ids[:_OPENING])

    def _refuse_other_layers(self) -> None:
        """What all of the above takes for granted of a decoder layer."""
        body, kind = self.model.base_model, self.model.config.model_type
        for layer, module in enumerate(getattr(body, "layers", [None])):
            attention = getattr(module, "self_attn", None)
            if not hasattr(attention, "o_proj"):
                raise UnsupportedModel(
                    "architecture", f"{kind!r} has no attention layers.{layer}.self_attn.o_proj"
                )
            norm = getattr(attention, "k_norm", None)
            shape = [*getattr(getattr(norm, "weight", None), "shape", ())]
            if norm is not None and shape != [self.spec.head_dim]:
                raise UnsupportedModel(
                    "k_norm",
                    f"the weight in layer {layer} of {kind!r} has the shape {shape}; only a gain "
                    f"that all key heads share, [{self.spec.head_dim}], can be mapped",
                )


def stack_cache(cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [layers, tokens, kv_heads, head_dim] of a cache that holds one sequence."""
    k = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
    v = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
    return k, v


def build_cache(k: torch.Tensor, v: torch.Tensor) -> DynamicCache:
    """The inverse of `stack_cache`: a fresh cache with copies of these keys and values."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(k, v, strict=True)):
        cache.update(
            keys.transpose(0, 1)[None].clone(), values.transpose(0, 1)[None].clone(), layer
        )
    return cache


def _refuse_unknown(folder: Path) -> None:
    """The language model of some multi-modal checkpoints is known, the checkpoint as a whole is not."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            "architecture",
            f"{folder} is a {config.model_type!r} checkpoint, which does not load as a causal "
            "language model: save its language model to a folder of its own",
        )


class _Recorder:
    """Keeps the queries of the wanted positions of every layer of one forward pass."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        self.queries: list[torch.Tensor] = []

    def record(self, query: torch.Tensor, scaling: float) -> None:
        self.queries.append(query[0, :, self.positions].transpose(0, 1) * scaling)


def _recording_sdpa(module, query, key, value, attention_mask, query_recorder=None, **kwargs):
    """SDPA as Transformers does it; a recorder in the model's keyword arguments sees the queries."""
    if query_recorder is not None:
        query_recorder.record(query, kwargs["scaling"])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_RECORDING, _recording_sdpa)
AttentionMaskInterface.register(_RECORDING, sdpa_mask)
