"""The healed low-rank update of the small model: its file format, its checks and its merge into weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .gguf_source import file_sha256

FOLDER = Path(__file__).parent
RECIPE_FILE = FOLDER / "small_recipe.json"
UPDATE_FILE = FOLDER / "small_update.safetensors"

LOW_RANK = (".down", ".up")
# the least that fp16 holds without losing digits; a row of zeros is stored with it
SMALLEST_SCALE = 2.0**-14


class UpdateRefused(ValueError):
    """The update file does not belong to the recipe or to the weights it would be merged into."""


@dataclass(frozen=True)
class Recipe:
    """Which layers of the large model the small one leaves out, and the digest of the update it was healed with."""

    layers_removed: tuple[int, ...]
    update_sha256: str | None

    @classmethod
    def read(cls, path: Path = RECIPE_FILE) -> Recipe:
        data = json.loads(path.read_text())
        return cls(tuple(data["layers_removed"]), data["update"] and data["update"]["sha256"])

    def write(self, path: Path = RECIPE_FILE) -> None:
        update = self.update_sha256 and {"sha256": self.update_sha256}
        path.write_text(
            json.dumps({"layers_removed": list(self.layers_removed), "update": update}, indent=2)
            + "\n"
        )

    def kept(self, layers: int) -> list[int]:
        return [layer for layer in range(layers) if layer not in self.layers_removed]


def pruned_weights(weights: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """The weights of a model that has only the `kept` layers, renumbered from 0."""
    new_index = {old: new for new, old in enumerate(kept)}
    pruned = {}
    for name, value in weights.items():
        if not name.startswith("model.layers."):
            pruned[name] = value
            continue
        _, _, old, rest = name.split(".", 3)
        if int(old) in new_index:
            pruned[f"model.layers.{new_index[int(old)]}.{rest}"] = value
    return pruned


def save_update(
    update: dict[str, torch.Tensor], layers_removed: tuple[int, ...], path: Path
) -> None:
    """`update` holds `<linear>.down` [rank, in] and `<linear>.up` [out, rank] a linear, and whole norm weights.

    Low-rank matrices are stored as int8 with one fp16 scale a row, `<name>.scale` [rows, 1]: the file's limit buys
    twice the rank of bf16, and what rounding takes (a half per cent of the update) is less than the added rank gives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "layers_removed": json.dumps(list(layers_removed))}
    tensors = {}
    for name, value in update.items():
        value = value.detach().float()
        if not name.endswith(LOW_RANK):
            tensors[name] = value.to(torch.bfloat16)
            continue
        scale = (value.abs().amax(1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE).half()
        tensors[name] = (value / scale.float()).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}.scale"] = scale
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)


def load_update(recipe: Recipe, path: Path = UPDATE_FILE) -> dict[str, torch.Tensor]:
    """The update's tensors, refused unless the file is the one the recipe names, for the same layers."""
    digest = file_sha256(path)
    if digest != recipe.update_sha256:
        raise UpdateRefused(
            f"{path.name} has SHA-256 {digest}, the recipe names {recipe.update_sha256}"
        )
    with safe_open(path, framework="pt") as file:
        removed = tuple(json.loads(file.metadata()["layers_removed"]))
        if removed != recipe.layers_removed:
            raise UpdateRefused(
                f"{path.name} was trained without layers {removed}, not {recipe.layers_removed}"
            )
        names = set(file.keys())
        update = {}
        for name in names:
            if name.endswith(".scale"):
                continue
            update[name] = file.get_tensor(name).float()
            # without a scale it is a norm, in bf16
            if f"{name}.scale" in names:
                update[name] *= file.get_tensor(f"{name}.scale").float()
        return update


def mean_update(recipe: Recipe, paths: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of updates that were trained one from the other.

    Each of them is off by the noise of its last steps, of which a mean takes a part out (stochastic weight averaging,
    Izmailov et al. 2018).
    """
    updates = [
        load_update(Recipe(recipe.layers_removed, file_sha256(path)), path) for path in paths
    ]
    shapes = [{name: value.shape for name, value in update.items()} for update in updates]
    if any(found != shapes[0] for found in shapes):
        raise UpdateRefused(f"{', '.join(map(str, paths))} hold tensors of different shapes")
    return {name: torch.stack([u[name] for u in updates]).mean(0) for name in updates[0]}


def merge(
    weights: dict[str, torch.Tensor], update: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """New weights in which every low-rank pair is added to its linear and every norm weight replaced."""
    merged = dict(weights)
    for name, value in update.items():
        module, kind = name.rsplit(".", 1)
        if kind == "up":
            continue
        target = f"{module}.weight"
        if kind == "down":
            value = _low_rank(update, module, value, weights)
        if target not in weights or weights[target].shape != value.shape:
            found = tuple(weights[target].shape) if target in weights else "nothing"
            raise UpdateRefused(
                f"update of {target} has shape {tuple(value.shape)}, the weights have {found}"
            )
        merged[target] = weights[target] + value if kind == "down" else value
    return merged


def _low_rank(
    update: dict[str, torch.Tensor],
    module: str,
    down: torch.Tensor,
    weights: dict[str, torch.Tensor],
) -> torch.Tensor:
    up = update.get(f"{module}.up")
    if up is None or up.shape[1] != down.shape[0]:
        raise UpdateRefused(f"update of {module} lacks the matching half of its low-rank pair")
    return up @ down
