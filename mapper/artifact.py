"""A fitted map on disk: safetensors files and a manifest that says what they are valid for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mapper.errors import BadArtifact, UnsupportedModel
from mapper.methods.base import CacheMap, IdentityMap, KVMap
from mapper.methods.plans import LayerPlan, layer_map
from mapper.rotary import Rotary
from mapper.spec import ModelSpec

VERSION = 3
MANIFEST = "manifest.json"
MAPS, SINK = "maps.safetensors", "sink.safetensors"
_MAX_MANIFEST_BYTES = 16 << 20

# A pair whose caches differ in one of these cannot be mapped head by head, token by token.
PAIR_FIELDS = (
    "tokenizer_digest",
    "chat_template_digest",
    "kv_heads",
    "head_dim",
    "kv_dtype",
    "page_size",
)


class CalibrationRecord(BaseModel):
    """What a map was fitted from: digests and tokens, never text."""

    model_config = ConfigDict(extra="forbid")

    sources: dict[str, str] = Field(default_factory=dict)
    documents: int = 0
    tokens: int = 0
    rows: int = 0
    held_out_documents: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_bytes: int = 0


class Manifest(BaseModel):
    """Everything about an artifact but its tensors."""

    model_config = ConfigDict(extra="forbid")

    version: int = VERSION
    source: ModelSpec
    target: ModelSpec
    method: str
    k: list[LayerPlan]
    v: list[LayerPlan]
    parameters: int
    native_tail: int = Field(ge=0, default=0)
    sink_token_ids: list[int]
    calibration: CalibrationRecord
    selection: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    quality: dict[str, Any] | None = None


class Artifact:
    """A verified artifact: `Artifact.load`, then `check` a live pair, then `compile`."""

    def __init__(
        self,
        manifest: Manifest,
        maps: CacheMap | None,
        sinks: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """`sinks` are k, v [sink tokens, target_layers, kv_heads, head_dim]."""
        self.manifest = manifest
        self.maps = maps
        self._sinks = sinks
        self._sink_rows = {token: row for row, token in enumerate(manifest.sink_token_ids)}

    @classmethod
    def load(cls, folder: Path) -> Artifact:
        """
        Raises:
            BadArtifact: a file is missing, altered or truncated, or of another version.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        files = {}
        for name, expected in manifest.files.items():
            if Path(name).name != name:
                raise BadArtifact(f"{folder}: the manifest names a file outside: {name!r}")
            if not (folder / name).is_file():
                raise BadArtifact(f"{folder}: {name} is missing")
            if file_digest(folder / name) != expected:
                raise BadArtifact(f"{folder}: {name} does not have the SHA-256 of the manifest")
            try:
                files[name] = load_file(folder / name)
            except SafetensorError as error:
                raise BadArtifact(f"{folder}: {name}: {error}") from error
        try:
            sinks = files[SINK]["k"], files[SINK]["v"]
            maps = None if manifest.method == "identity" else _maps(manifest, files[MAPS])
        except KeyError as error:
            raise BadArtifact(f"{folder}: {error} is missing") from error
        target = manifest.target
        shape = (len(manifest.sink_token_ids), target.layers, target.kv_heads, target.head_dim)
        if any(tensor.shape != shape for tensor in sinks):
            raise BadArtifact(f"{folder}: the sink table does not have the shape {shape}")
        return cls(manifest, maps, sinks)

    def save(self, folder: Path) -> None:
        """Writes the artifact so that a reader only ever sees it whole.

        Raises:
            BadArtifact: what is in `folder` is no artifact, and is left as it is.
        """
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file({"k": self._sinks[0], "v": self._sinks[1]}, part / SINK)
            if self.maps is not None:
                save_file(_tensors(self.maps), part / MAPS)
            self.manifest.files = {
                path.name: file_digest(path) for path in sorted(part.glob("*.safetensors"))
            }
            _write_synced(part / MANIFEST, self.manifest.model_dump_json(indent=1))
            part.chmod(0o755)
            _replace(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def check(self, source: ModelSpec, target: ModelSpec) -> None:
        """
        Raises:
            UnsupportedModel: the live pair is not the one this map was made for; `field`
                names the first difference.
        """
        for side, live in (("source", source), ("target", target)):
            made_for = getattr(self.manifest, side)
            for field in made_for.differences(live):
                raise UnsupportedModel(
                    f"{side}.{field}",
                    f"the worker has {getattr(live, field)!r}, "
                    f"the artifact was made for {getattr(made_for, field)!r}; calibrate this pair",
                )
        check_pair(source, target)

    def compile(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> KVMap | IdentityMap:
        """The map ready to run; matrix products in `dtype`, rotations and sums in fp32."""
        if self.maps is None:
            return IdentityMap()
        source, target = (
            Rotary.from_spec(self.manifest.source),
            Rotary.from_spec(self.manifest.target),
        )
        layers = self.manifest.source.layers
        return KVMap(self.maps, source, target, source_layers=layers, device=device, dtype=dtype)

    def sink(self, token_id: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Exact k, v [target_layers, kv_heads, head_dim] of `token_id` at position 0, if known."""
        row = self._sink_rows.get(token_id)
        return None if row is None else (self._sinks[0][row], self._sinks[1][row])


def check_pair(source: ModelSpec, target: ModelSpec) -> None:
    """
    Raises:
        UnsupportedModel: the two models' caches do not correspond; `field` names where.
    """
    for field in PAIR_FIELDS:
        mine, other = getattr(source, field), getattr(target, field)
        if mine != other:
            raise UnsupportedModel(
                field, f"source has {mine!r}, target {other!r}; only equal ones can be mapped"
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, without reading or verifying the tensors.

    Raises:
        BadArtifact: it is missing, malformed or of another version.
    """
    path = Path(folder) / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BadArtifact(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArtifact(f"{path}: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise BadArtifact(f"{path}: version {version!r}; this Baton reads version {VERSION}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise BadArtifact(f"{path}: {error}") from error


def write_quality(folder: Path, card: dict[str, Any]) -> None:
    """Puts a quality card into the manifest of an existing artifact."""
    manifest = read_manifest(folder)
    manifest.quality = card
    part = Path(folder) / f".{MANIFEST}.part"
    _write_synced(part, manifest.model_dump_json(indent=1))
    part.rename(Path(folder) / MANIFEST)


def refuse_to_replace(folder: Path) -> None:
    """Saving an artifact deletes what was in its folder before: only an older artifact may be.

    Raises:
        BadArtifact: something else is there.
    """
    if folder.is_dir():
        foreign = any(folder.iterdir()) and not (folder / MANIFEST).is_file()
    else:
        foreign = folder.exists()
    if foreign:
        raise BadArtifact(
            f"{folder} is not empty and holds no artifact ({MANIFEST} is missing), and saving one "
            "there would delete it: choose another folder, or empty this one"
        )


def describe(path: Path) -> dict[str, Any]:
    """What `baton inspect` shows of an artifact, after verifying all of it."""
    manifest = Artifact.load(path).manifest
    summary = manifest.model_dump(mode="json", exclude={"k", "v"})
    summary["layers"] = {
        kind: [str(plan) for plan in getattr(manifest, kind)] for kind in ("k", "v")
    }
    return summary


def _tensors(maps: CacheMap) -> dict[str, torch.Tensor]:
    tensors = {
        f"{kind}.{layer}.{name}": tensor
        for kind in ("k", "v")
        for layer, layer_map in enumerate(getattr(maps, kind))
        for name, tensor in layer_map.tensors().items()
    }
    if maps.key_norms is not None:
        tensors["key_norms"] = maps.key_norms.float().contiguous()
    return tensors


def _maps(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> CacheMap:
    maps = {
        kind: [
            layer_map(manifest.source, plan, tensors, f"{kind}.{layer}")
            for layer, plan in enumerate(getattr(manifest, kind))
        ]
        for kind in ("k", "v")
    }
    if any(len(layers) != manifest.target.layers for layers in maps.values()):
        raise BadArtifact(f"the maps do not cover the target's {manifest.target.layers} layers")
    return CacheMap(maps["k"], maps["v"], tensors.get("key_norms"))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _replace(part: Path, folder: Path) -> None:
    """Renames `part` to `folder`; an older artifact there is moved aside first, then removed."""
    refuse_to_replace(folder)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
