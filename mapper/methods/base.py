"""The maps every method ends in, and their run-time application to a whole transfer at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mapper.rotary import Rotary

# Tokens mapped at a time: bounds the intermediate copies to a few hundred MB for the
# largest pairs, and is long enough that the matrix products run at full speed.
CHUNK_TOKENS = 512


# What maps of keys ("k") and of values ("v") read: the source's un-rotated keys, its values, or `wide_inputs`, each as
# `by_head` lays it out.
Features = Mapping[str, torch.Tensor]


class LayerMap(Protocol):
    """One target layer's keys or values from the source's. A dataclass: its tensors are what a
    fit or a training sets, everything else says what is read."""

    parameters: int
    reads: frozenset[int]

    def __call__(self, features: Features, kind: str) -> torch.Tensor:
        """The layer's `kind` ("k" or "v"), [kv_heads, rows, head_dim] in fp32."""

    def to(self, device: str, dtype: torch.dtype) -> LayerMap: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class AffineMap:
    """y = x W + b. `weight` is [kv_heads, k * head_dim, head_dim] when each head sees only
    itself (head-local, arXiv 2609.00891) and [1, kv_heads * k * head_dim, kv_heads * head_dim]
    when it sees all heads (arXiv 2608.03893); `bias` [kv_heads, head_dim].

    Input rows are head-major: (head, selected layer, dimension). `layers` count on from the source's own in the order of
    `wide_inputs`.
    """

    layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def head_local(self) -> bool:
        return self.weight.shape[2] == self.bias.shape[1]

    @property
    def parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(self.layers)

    @property
    def inputs_per_output(self) -> int:
        return self.weight.shape[1]

    def blocks_read(self, head: int) -> list[tuple[int, int]]:
        """(source layer, source head) of the inputs of one target head, in their order."""
        heads = [head] if self.head_local else range(len(self.bias))
        return [(layer, source) for source in heads for layer in self.layers]

    def inputs(self, features: Features, kind: str) -> torch.Tensor:
        """[kv_heads or 1, rows, inputs per output]."""
        x = select(features[kind], self.layers)
        return x if self.head_local else x.transpose(0, 1).flatten(1)[None]

    def __call__(self, features: Features, kind: str) -> torch.Tensor:
        x = select(features[kind], self.layers)
        if self.head_local:
            return torch.bmm(x, self.weight).float() + self.bias[:, None]
        heads, rows, columns = x.shape
        # One product a head, summed: a slice of the features is never copied for it.
        weight = self.weight[0].view(heads, columns, -1)
        y = x[0] @ weight[0]
        for head in range(1, heads):
            y.addmm_(x[head], weight[head])
        return y.float().view(rows, heads, -1).transpose(0, 1) + self.bias[:, None]

    def to(self, device: str, dtype: torch.dtype) -> AffineMap:
        # The bias stays fp32: it is added after the product, at no cost.
        return AffineMap(self.layers, self.weight.to(device, dtype), self.bias.float().to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.float().contiguous(), "bias": self.bias.float().contiguous()}


@dataclass(frozen=True)
class CacheMap:
    """A fitted map of a whole cache: a key map and a value map for each target layer.

    `key_norms`, for models with a k_norm, are its gains [head_dim] a target layer: mapped
    keys are put back on the sphere that the norm would have put them on.
    """

    k: Sequence[LayerMap]
    v: Sequence[LayerMap]
    key_norms: torch.Tensor | None = None

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in (*self.k, *self.v))

    def wide(self, source_layers: int) -> bool:
        """Whether a key or value is made of more than the source's keys or values of its token."""
        return any(max(layer.reads) >= source_layers for layer in (*self.k, *self.v))

    def looks_back(self, source_layers: int) -> bool:
        """Whether a key is made of the token before as well."""
        return any(read // source_layers % 2 for layer in self.k for read in layer.reads)


class KVMap:
    """A `CacheMap` bound to both models' rotations, ready to run.

    Where `looks_back` is true, a token's predecessor has to stand before it.
    """

    def __init__(
        self,
        maps: CacheMap,
        source: Rotary,
        target: Rotary,
        *,
        source_layers: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.looks_back = maps.looks_back(source_layers)
        self._wide = maps.wide(source_layers)
        self._k = [layer.to(device, dtype) for layer in maps.k]
        self._v = [layer.to(device, dtype) for layer in maps.v]
        self._norms = None if maps.key_norms is None else maps.key_norms.float().to(device)
        self._source, self._target = source, target
        self._device, self._dtype = device, dtype

    @torch.inference_mode()
    def apply(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts all tokens of a transfer.

        Args:
            k, v: [source_layers, tokens, kv_heads, head_dim] as the source caches them.
            positions: [tokens], absolute.

        Returns:
            k, v [target_layers, tokens, kv_heads, head_dim] as the target would cache them,
            in the dtype of the input. A map that looks back gives no meaning to keys of a token whose predecessor
            is not the row before.
        """
        k, v, positions = (tensor.to(self._device) for tensor in (k, v, positions))
        size = (len(self._k), *k.shape[1:])
        out_k, out_v = torch.empty(size, dtype=k.dtype), torch.empty(size, dtype=v.dtype)
        out_k, out_v = out_k.to(self._device), out_v.to(self._device)
        for start in range(0, k.shape[1], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            before = slice(max(start - 1, 0), start + CHUNK_TOKENS)
            mapped = self._map(k[:, before], v[:, before], positions[before])
            for out, rows in zip((out_k, out_v), mapped, strict=True):
                out[:, part] = rows[:, part.start - before.start :]
        return out_k, out_v

    def _map(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._source.undo(k.float(), positions).to(self._dtype), v.to(self._dtype)
        features = as_features(wide_inputs(k, v) if self._wide else {"k": k, "v": v})
        keys = map_layers(self._k, features, "k")
        if self._norms is not None:
            keys = on_norm_sphere(keys, self._norms)
        return self._target.apply(keys, positions), map_layers(self._v, features, "v")


class IdentityMap:
    """The map of a model onto itself; checks a deployment's plumbing to the last bit."""

    looks_back = False

    def apply(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return k.clone(), v.clone()


def map_layers(maps: Sequence[LayerMap], features: Features, kind: str) -> torch.Tensor:
    """Features of some rows -> [target_layers, rows, kv_heads, head_dim], fp32.

    One matrix product a target layer (all-head: one a head), over all rows.
    """
    return torch.stack([layer_map(features, kind).transpose(0, 1) for layer_map in maps])


def wide_inputs(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """All that a row's key and value may be made of, from [layers, rows, heads, head_dim] of un-rotated keys and values.

    A key's ("k"), [4 * layers, rows, heads, head_dim]: the row's keys, those of the row before (the first row stands for
    its own predecessor), its values, those of the row before. A value's ("v"), [2 * layers, rows, heads, head_dim]: the
    row's values, its keys. Keys and values of a layer are two projections of one hidden state: each knows what the other
    does not. The keys of induction heads are made of the token before (Olsson et al. 2022), by way of its values; a
    source that has no such head at the right depth has not moved it to where the target wants to find it.
    """
    key = [part for own in (keys, values) for part in (own, _previous(own))]
    return {"k": torch.cat(key), "v": torch.cat((values, keys))}


def _previous(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows[:, :1], rows[:, :-1]), dim=1)


def as_features(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs [layers, rows, heads, head_dim] by kind, as maps read them."""
    return {kind: by_head(rows) for kind, rows in inputs.items()}


def by_head(features: torch.Tensor) -> torch.Tensor:
    """[source_layers, rows, heads, head_dim] -> [heads, rows, source_layers, head_dim]."""
    return features.permute(2, 1, 0, 3).contiguous()


def select(features: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """[heads, rows, source_layers, head_dim] -> [heads, rows, k * head_dim] of sorted `layers`.

    The best source layers are mostly neighbours: a run of them is a view, and only several
    runs are copied (on a CPU an index gather costs more than the product it feeds).
    """
    runs = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1][1] = layer + 1
        else:
            runs.append([layer, layer + 1])
    parts = [features[:, :, start:stop].flatten(2) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def on_norm_sphere(keys: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """Keys [layers, rows, heads, head_dim] scaled so that key / gain has a mean square of 1.

    A k_norm caches gain * x / rms(x): the mapped key's direction is kept, its length is known.
    """
    gains = gains[:, None, None]
    mean_square = (keys / gains).square().mean(-1, keepdim=True)
    return keys * torch.rsqrt(mean_square + 1e-12)
