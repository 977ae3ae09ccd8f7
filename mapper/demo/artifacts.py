"""The demo pair's mapping artifacts, both directions, calibrated into the cache on first use."""

from __future__ import annotations

import hashlib
from pathlib import Path

from filelock import FileLock

from mapper.artifact import Artifact
from mapper.demo.models import cache_folder, cached_models, demo_models
from mapper.errors import BadArtifact

DIALOGUES = Path(__file__).with_name("dialogues.jsonl")
PROSE = Path(__file__).with_name("prose.jsonl")
DIRECTIONS = ("small-large", "large-small")
KV_DTYPE = "float32"
PAGE_SIZE = 16
# How the demo's maps are fitted; part of the cache key, so that a change makes new ones.
RECIPE = {"method": "all-head", "k": 6, "tokens": 20_000, "native_tail": 64}


def demo_artifacts() -> dict[str, Path]:
    """Folders by direction, `small-large` and `large-small`; calibrates those not cached.

    Raises:
        CalibrationError: the committed dialogues are damaged.
    """
    models = demo_models()
    folders = cached_artifacts()
    _calibrate(models, *folders.values())
    return folders


def cached_artifacts() -> dict[str, Path]:
    """Where the artifacts are, or will be once calibrated, by direction."""
    models = cached_models()
    inputs = repr((RECIPE, KV_DTYPE, PAGE_SIZE, models["small"].name, models["large"].name))
    texts = DIALOGUES.read_bytes() + PROSE.read_bytes()
    key = hashlib.sha256(inputs.encode() + texts).hexdigest()[:12]
    root = cache_folder().parent / "artifacts"
    return {direction: root / f"{direction}-{key}" for direction in DIRECTIONS}


def _calibrate(models: dict[str, Path], there: Path, back: Path) -> None:
    """Both directions from one pass, unless both are there and whole."""
    there.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(there.with_suffix(".lock")):
        try:
            for folder in (there, back):
                Artifact.load(folder)
        except BadArtifact:
            # Torch and Transformers are slow to import: not before they are needed.
            from mapper import calibrate

            calibrate.run(
                models["small"], models["large"], [DIALOGUES, PROSE], there,
                reverse=back, kv_dtype=KV_DTYPE, page_size=PAGE_SIZE, **RECIPE,
            )  # fmt: skip
            # More than a gigabyte that only a merge with other text would need.
            calibrate.checkpoint_path(there).unlink()
