"""The published model pairs: their shapes and k (arXiv 2608.03893), one JSON file each."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mapper.errors import UnsupportedModel

_FOLDER = Path(__file__).parent


class ModelShape(BaseModel):
    """What the size of a map and the cost of a prefill depend on."""

    model_config = ConfigDict(extra="forbid")

    name: str
    architecture: str
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def prefill_flops(self) -> int:
        """Of one token, in the layers' matrix products (attention scores left out)."""
        queries, keys = self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (queries + keys)
        return 2 * self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)


class Preset(BaseModel):
    """A pair, the paper's k for it, and the retention (%) that the paper reports."""

    model_config = ConfigDict(extra="forbid")

    name: str
    source: ModelShape
    target: ModelShape
    k: int
    published: dict[str, float]


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read(name: str) -> Preset:
    """
    Raises:
        UnsupportedModel: there is no such preset.
    """
    if name not in names():
        raise UnsupportedModel("pair", f"no preset {name!r}; there are {', '.join(names())}")
    return Preset.model_validate_json((_FOLDER / f"{name}.json").read_text())
