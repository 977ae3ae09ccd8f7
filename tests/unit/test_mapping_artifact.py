"""Artifacts: what was saved is what runs, and what was altered is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    SmolLM3Config,
)

from mapper.artifact import (
    MANIFEST,
    MAPS,
    SINK,
    Artifact,
    CalibrationRecord,
    LayerPlan,
    Manifest,
    check_pair,
    describe,
    write_quality,
)
from mapper.errors import BadArtifact, UnsupportedModel
from mapper.methods.base import AffineMap, CacheMap
from mapper.spec import ModelSpec, read_spec, refuse_unmappable
from tests.tiny_pair import TEMPLATE, write_model

HEADS, WIDTH = 2, 4


def spec(layers: int, **changes) -> ModelSpec:
    fields = dict(
        name="tiny",
        architecture="llama",
        layers=layers,
        attention_heads=4,
        kv_heads=HEADS,
        head_dim=WIDTH,
        hidden_size=16,
        vocab_size=97,
        rope={"rope_type": "default", "rope_theta": 1e4},
        tokenizer_digest="t",
        chat_template_digest="c",
        weights_digest=f"w{layers}",
        kv_dtype="float32",
        page_size=16,
    )
    return ModelSpec(**{**fields, **changes})


@pytest.fixture
def artifact() -> Artifact:
    torch.manual_seed(0)

    def layer(local: bool) -> AffineMap:
        size = (HEADS, 2 * WIDTH, WIDTH) if local else (1, HEADS * WIDTH, HEADS * WIDTH)
        layers = (0, 1) if local else (1,)
        return AffineMap(layers, torch.randn(size), torch.randn(HEADS, WIDTH))

    maps = CacheMap([layer(True) for _ in range(3)], [layer(False) for _ in range(3)])
    plans = {
        kind: [LayerPlan.of(one, ridge=1e-4) for one in getattr(maps, kind)] for kind in ("k", "v")
    }
    manifest = Manifest(
        source=spec(2),
        target=spec(3),
        method="ridge",
        **plans,
        parameters=maps.parameters,
        native_tail=32,
        sink_token_ids=[1, 7],
        calibration=CalibrationRecord(tokens=123),
    )
    sinks = torch.randn(2, 3, HEADS, WIDTH), torch.randn(2, 3, HEADS, WIDTH)
    return Artifact(manifest, maps, sinks)


@pytest.fixture
def saved(artifact: Artifact, tmp_path):
    artifact.save(tmp_path / "pair")
    return tmp_path / "pair"


def test_a_loaded_artifact_maps_as_the_saved_one(artifact: Artifact, saved) -> None:
    k, v = torch.randn(2, 2, 9, HEADS, WIDTH)
    positions = torch.arange(5, 14)
    loaded = Artifact.load(saved)
    expected = artifact.compile().apply(k, v, positions)
    for ours, theirs in zip(loaded.compile().apply(k, v, positions), expected, strict=True):
        assert ours.shape == (3, 9, HEADS, WIDTH)
        assert torch.equal(ours, theirs)
    assert torch.equal(loaded.sink(7)[1], artifact._sinks[1][1])
    assert loaded.sink(2) is None
    assert describe(saved)["calibration"]["tokens"] == 123


def test_mapping_is_token_by_token(artifact: Artifact, monkeypatch) -> None:
    """Chunking over tokens does not change a result."""
    k, v = torch.randn(2, 2, 9, HEADS, WIDTH)
    whole = artifact.compile().apply(k, v, torch.arange(9))
    monkeypatch.setattr("mapper.methods.base.CHUNK_TOKENS", 4)
    for ours, theirs in zip(artifact.compile().apply(k, v, torch.arange(9)), whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_saving_again_replaces_and_leaves_nothing_beside(artifact: Artifact, saved) -> None:
    artifact.manifest.native_tail = 48
    artifact.save(saved)
    assert Artifact.load(saved).manifest.native_tail == 48
    assert [path.name for path in saved.parent.iterdir()] == ["pair"]


@pytest.mark.parametrize("place", ["pair", "pair/notes.txt"])
def test_what_is_no_artifact_is_not_replaced(artifact: Artifact, tmp_path, place: str) -> None:
    """Neither a file nor a folder with a file in it; a folder without one is."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    with pytest.raises(BadArtifact, match="choose another folder"):
        artifact.save(tmp_path / "pair")
    assert (tmp_path / place).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    (tmp_path / "empty").mkdir()
    artifact.save(tmp_path / "empty")
    assert Artifact.load(tmp_path / "empty").manifest.native_tail == 32


@pytest.mark.parametrize("name", [MAPS, SINK])
def test_an_altered_byte_is_refused(saved, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-1] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(BadArtifact, match="SHA-256"):
        Artifact.load(saved)


def test_a_truncated_or_missing_file_is_refused(saved) -> None:
    (saved / MAPS).write_bytes((saved / MAPS).read_bytes()[:-64])
    with pytest.raises(BadArtifact, match="SHA-256"):
        Artifact.load(saved)
    (saved / MAPS).unlink()
    with pytest.raises(BadArtifact, match="missing"):
        Artifact.load(saved)


def test_a_newer_version_and_a_malformed_manifest_are_refused(saved) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["version"] += 1
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadArtifact, match="version 3"):
        Artifact.load(saved)
    (saved / MANIFEST).write_text("{")
    with pytest.raises(BadArtifact):
        Artifact.load(saved)


def test_a_manifest_that_reaches_outside_is_refused(saved) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"]["../../etc/passwd"] = "0" * 64
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadArtifact, match="outside"):
        Artifact.load(saved)


def test_a_plan_that_does_not_fit_its_tensors_is_refused(saved) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["k"][1]["layers"] = [0]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadArtifact, match=r"k\.1 reads head-local 0 with the shapes"):
        Artifact.load(saved)
    manifest["k"][1]["layers"] = [0, 9]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadArtifact, match="source layers"):
        Artifact.load(saved)


def test_check_names_the_field_that_differs(artifact: Artifact) -> None:
    artifact.check(spec(2, name="renamed"), spec(3))
    with pytest.raises(UnsupportedModel) as refused:
        artifact.check(spec(2), spec(3, weights_digest="other"))
    assert refused.value.field == "target.weights_digest"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_digest", "x"),
        ("chat_template_digest", "x"),
        ("kv_heads", 4),
        ("head_dim", 8),
        ("kv_dtype", "bfloat16"),
        ("page_size", 32),
    ],
)
def test_pairs_that_do_not_correspond_are_refused(field: str, value) -> None:
    check_pair(spec(2), spec(3))
    with pytest.raises(UnsupportedModel) as refused:
        check_pair(spec(2), spec(3, **{field: value}))
    assert refused.value.field == field


SMALL = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("field", "config", "kv_dtype"),
    [
        ("kv_lora_rank", DeepseekV3Config(**SMALL), "float32"),
        ("sliding_window", MistralConfig(**SMALL, sliding_window=64), "float32"),
        (
            "layer_types",
            LlamaConfig(**SMALL, layer_types=["full_attention", "linear_attention"] * 2),
            "float32",
        ),
        ("rope_parameters", GPT2Config(), "float32"),
        ("no_rope_layers", SmolLM3Config(**SMALL), "float32"),
        ("kv_dtype", LlamaConfig(**SMALL), "fp8_e4m3"),
    ],
)
def test_models_that_cannot_be_mapped_are_refused(tmp_path, field, config, kv_dtype) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(tmp_path, name="tiny", kv_dtype=kv_dtype, page_size=16)
    assert refused.value.field == field


def test_a_chat_template_is_the_same_in_either_of_its_files(tmp_path) -> None:
    def digest(name: str, template: object = None) -> str:
        folder = write_model(tmp_path / name, 1, 0)
        if template is not None:
            (folder / "chat_template.jinja").unlink()
            config = json.loads((folder / "tokenizer_config.json").read_text())
            config["chat_template"] = template
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found = read_spec(folder, name="tiny", kv_dtype="float32", page_size=16)
        return found.chat_template_digest

    own = digest("jinja")
    assert digest("config", TEMPLATE) == own
    several = [{"name": "default", "template": TEMPLATE}]
    others = {digest("changed", f"{TEMPLATE} "), digest("several", several), digest("none", "")}
    assert len({own} | others) == 4


def test_a_model_that_uses_none_of_it_is_not_refused() -> None:
    """A window that is switched off, and layers without rotation beyond those that there are."""
    rotated = {"no_rope_layers": [1, 1, 1, 1, 0]}
    refuse_unmappable(SmolLM3Config(**SMALL, **rotated, sliding_window=64))


def test_a_quality_card_is_kept_and_changes_no_tensor(saved) -> None:
    write_quality(saved, {"kl": 0.02})
    manifest = Artifact.load(saved).manifest
    assert (manifest.quality, manifest.native_tail) == ({"kl": 0.02}, 32)
