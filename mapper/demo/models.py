"""Builds the demo's large and small models as Hugging Face folders in the cache, keyed by their inputs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig

from . import gguf_source, update
from .gguf_source import file_sha256

# Raise it when the code below would write other bytes for the same inputs.
RECIPE_VERSION = "1"
MANIFEST = "baton-files.json"

console = Console(stderr=True)


def cache_folder() -> Path:
    root = os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton"
    return Path(root) / "models"


def content_key(*inputs: str) -> str:
    """Twelve hex digits that change with any of the inputs (each length-prefixed, so that none can run together)."""
    digest = hashlib.sha256()
    for text in (RECIPE_VERSION, *inputs):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def cached_models() -> dict[str, Path]:
    """Where the demo models are, or will be once built."""
    gguf = file_sha256(gguf_source.gguf_path())
    recipe = update.Recipe.read()
    small = content_key("small", gguf, str(recipe.layers_removed), str(recipe.update_sha256))
    names = {"large": f"large-{content_key('large', gguf)}", "small": f"small-{small}"}
    return {tier: cache_folder() / name for tier, name in names.items()}


def build_large() -> Path:
    """The folder of SmolLM2-135M-Instruct (30 layers), built from the packaged GGUF when the cache lacks it."""
    source = gguf_source.gguf_path()
    return _cached(cached_models()["large"], lambda folder: _write_large(source, folder))


def build_small() -> Path:
    """The folder of the small model: the large one without the recipe's layers, healed by the committed update."""
    source = gguf_source.gguf_path()
    recipe = update.Recipe.read()
    return _cached(cached_models()["small"], lambda folder: _write_small(source, recipe, folder))


def demo_models() -> dict[str, Path]:
    return {"small": build_small(), "large": build_large()}


def _write_large(source: Path, folder: Path) -> None:
    config = gguf_source.read_config(source)
    gguf_source.read_tokenizer(source, config.max_position_embeddings).save_pretrained(folder)
    _write_model(folder, config, gguf_source.read_weights(source, config))


def _write_small(source: Path, recipe: update.Recipe, folder: Path) -> None:
    # Copied, not written again: both models must tokenise and render every conversation byte for byte alike.
    for file in build_large().iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copyfile(file, folder / file.name)
    config = gguf_source.read_config(source)
    kept = recipe.kept(config.num_hidden_layers)
    weights = update.pruned_weights(gguf_source.read_weights(source, config), kept)
    if recipe.update_sha256:
        weights = update.merge(weights, update.load_update(recipe))
    else:
        console.print(
            "[yellow]the recipe names no update: this small model is pruned but not healed[/]"
        )
    config.num_hidden_layers = len(kept)
    _write_model(folder, config, weights)


def _write_model(folder: Path, config: LlamaConfig, weights: dict) -> None:
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _cached(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`; written by one builder at a time and only ever seen complete."""
    root, name = folder.parent, folder.name
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):
        if is_whole(folder):
            return folder
        if folder.exists():
            console.print(f"[yellow]{folder} is damaged and is built again[/]")
            shutil.rmtree(folder)
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            with console.status(f"building the demo model {name}"):
                write(part)
                _write_manifest(part)
            part.chmod(0o755)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    console.print(f"built {folder}")
    return folder


def _write_manifest(folder: Path) -> None:
    digests = {file.name: file_sha256(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n")


def is_whole(folder: Path) -> bool:
    """Whether every file that was built is still there with the bytes it was built with."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        return all(file_sha256(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False
