"""Maps that look back: keys made of the token before as well, from sums to pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mapper.artifact import Artifact, LayerPlan
from mapper.capture.model import Prefill
from mapper.capture.pairs import Pair, asked
from mapper.capture.texts import Document
from mapper.errors import BadArtifact
from mapper.methods.base import AffineMap, CacheMap, KVMap, by_head, with_previous
from mapper.methods.blocks import BlockSearch, fit_blocks
from mapper.methods.choose import candidates
from mapper.methods.plans import layer_map
from mapper.methods.ridge import fit_layer
from mapper.moments import KINDS, Moments, PairShape
from mapper.store import PageLayout, Provenance
from tests.unit import test_mapper_service as service

LAYERS, HEADS, WIDTH = 3, 2, 4
SHAPE = PairShape(LAYERS, 1, HEADS, WIDTH, look_back=True)


class Still:
    """A rotation by nothing."""

    def undo(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return k

    apply = undo


def induction(rows: int, seed: int = 0, positions: torch.Tensor | None = None) -> Pair:
    """Key head 0 of the target is source layer 1, head 1, of the token before; all else of the token's own layer 2."""
    draw, fixed = (torch.Generator().manual_seed(one) for one in (seed, 7))
    source = {kind: torch.randn(LAYERS, rows, HEADS, WIDTH, generator=draw) for kind in KINDS}
    turn = torch.randn(HEADS, WIDTH, WIDTH, generator=fixed)
    target = {kind: torch.einsum("nhd,hde->nhe", source[kind][2], turn)[None] for kind in KINDS}
    target["k"][0, 1:, 0] = source["k"][1, :-1, 1] @ turn[0]
    positions = torch.arange(rows) if positions is None else positions
    return Pair(f"{seed:08x}", source, target, positions, Prefill(target["k"], target["v"]))


def moments_of(*pairs: Pair, shape: PairShape = SHAPE, both: bool = False) -> Moments:
    moments = Moments.empty(shape, "a->b", both=both)
    for pair in pairs:
        rows = pair.rows(1, look_back=shape.look_back)
        moments.add(pair.digest, *rows, tokens=len(pair.positions))
    return moments


def r2(mapped: torch.Tensor, native: torch.Tensor) -> float:
    return float(1 - (mapped - native).square().sum() / (native - native.mean(0)).square().sum())


def key_map(moments: Moments, kind: str = "k"):
    search = BlockSearch(moments, kind, 1e-6)
    paths = [search.path(0, head, 1) for head in range(HEADS)]
    return paths, fit_blocks(moments, kind, paths, 0, ridge=1e-6)


def test_what_is_the_token_befores_is_found_there_and_nowhere_else(monkeypatch) -> None:
    pair, other = induction(400), induction(50, seed=1)
    paths, keys = key_map(moments_of(pair))
    assert paths == [[(LAYERS + 1, 1)], [(2, 1)]]
    _, values = key_map(moments_of(pair), "v")
    cache = CacheMap([keys], [values])
    assert cache.looks_back(LAYERS)
    monkeypatch.setattr("mapper.methods.base.CHUNK_TOKENS", 7)
    kv_map = KVMap(cache, Still(), Still(), looks_back=True)
    k, v = kv_map.apply(other.source["k"], other.source["v"], other.positions)
    assert r2(k[0, 1:].flatten(1), other.target["k"][0, 1:].flatten(1)) > 0.999
    assert r2(v[0].flatten(1), other.target["v"][0].flatten(1)) > 0.999

    plain = replace(SHAPE, look_back=False)
    _, blind = key_map(moments_of(pair, shape=plain))
    assert not CacheMap([blind], [values]).looks_back(LAYERS)
    k, _ = KVMap(CacheMap([blind], [values]), Still(), Still()).apply(
        other.source["k"], other.source["v"], other.positions
    )
    assert r2(k[0, 1:, 0], other.target["k"][0, 1:, 0]) < 0.1


def test_a_row_is_followed_by_the_row_before_it() -> None:
    keys = torch.randn(2, 5, 3, 4)
    both = with_previous(keys)
    assert torch.equal(both[:2], keys)
    assert torch.equal(both[2:, 1:], keys[:, :-1]) and torch.equal(both[2:, 0], keys[:, 0])


def test_only_tokens_with_their_predecessor_are_fitted() -> None:
    """Pages of a store: two that follow each other, and one that stands alone."""
    pair = induction(12, positions=torch.tensor([*range(4), *range(4, 8), *range(20, 24)]))
    source, target = pair.rows(1, look_back=True)
    assert source["k"].shape[1] == source["v"].shape[1] == target["k"].shape[1] == 7 + 3
    assert pair.rows(1, look_back=False)[0]["k"].shape[:2] == (LAYERS, 11)
    later = induction(4, positions=torch.arange(8, 12))
    assert later.rows(1, look_back=True)[0]["k"].shape[1] == 3


@pytest.mark.parametrize("look_back", [True, False])
def test_one_pass_gives_both_directions(look_back: bool) -> None:
    shape = replace(SHAPE, look_back=look_back)
    pair = induction(60)
    both = moments_of(pair, shape=shape, both=True)
    there = moments_of(pair, shape=shape)
    swapped = replace(pair, source=pair.target, target=pair.source)
    back = moments_of(swapped, shape=shape.reverse)
    for ours, theirs in ((both.one_way(), there), (both.reverse("b->a").one_way(), back)):
        assert ours.shape == theirs.shape
        for kind in KINDS:
            for name, value in theirs.sums[kind].parts.items():
                assert torch.allclose(ours.sums[kind].parts[name], value)
    for moments, is_both in ((both, True), (there, False)):
        stored = sum(t.numel() * 8 for one in moments.sums.values() for t in one.parts.values())
        assert stored == shape.bytes(both=is_both)


@pytest.mark.parametrize("layers", [2, 9])
@pytest.mark.parametrize("look_back", [True, False])
def test_all_heads_of_both_tokens_are_a_candidate_for_keys_alone(layers, look_back) -> None:
    class Unheard:
        def score(self, layer: int, **maps):
            return type("Score", (), {"felt": 0.0})()

    shape = PairShape(layers, 1, HEADS, WIDTH, look_back=look_back)
    moments = Moments.empty(shape, "a->b")
    draw = torch.Generator().manual_seed(0)
    sizes = {kind: (shape.inputs(kind), 1) for kind in KINDS}
    source, target = (
        {kind: torch.randn(sizes[kind][at], 400, HEADS, WIDTH, generator=draw) for kind in KINDS}
        for at in (0, 1)
    )
    moments.add("d", source, target, tokens=400)
    found = candidates(moments, Unheard(), ridge=1e-6, report=lambda: None)
    for kind in KINDS:
        made = [one.layer_map for one in found[kind, 0] if isinstance(one.layer_map, AffineMap)]
        back = [one for one in made if max(one.reads) >= layers]
        assert bool(back) == (look_back and kind == "k")
        for one in back:
            assert not one.head_local
            assert {read % layers for read in one.reads} == {r for r in one.reads if r < layers}


def test_an_artifact_says_which_token_is_read_and_values_read_none_before(tmp_path) -> None:
    moments = moments_of(induction(60))
    source = service.spec("small", LAYERS)
    one = fit_layer(moments, "k", (1, LAYERS + 1), 0, head_local=False, ridge=1e-4)
    plan, tensors = LayerPlan.of(one, 1e-4), one.tensors()
    made = layer_map(source, plan, {f"k.0.{name}": t for name, t in tensors.items()}, "k.0")
    assert made.layers == (1, LAYERS + 1)
    with pytest.raises(BadArtifact, match="3 source layers"):
        layer_map(source, plan, {f"v.0.{name}": t for name, t in tensors.items()}, "v.0")
    wide = plan.model_copy(update={"layers": [1, 2 * LAYERS]})
    with pytest.raises(BadArtifact, match="3 source layers"):
        layer_map(source, wide, {f"k.0.{name}": t for name, t in tensors.items()}, "k.0")


def test_quotes_are_asked_for_where_they_begin() -> None:
    ids = torch.arange(100)
    quote = Document("0" * 16, "0" * 16, ids, "recall", (50, 90))
    assert asked(6)(quote).tolist() == [49, 50, 51, 89, 90, 91]
    assert len(asked(6)(replace(quote, kind="chat"))) == 6
    assert asked(6)(replace(quote, answers=(99,))).tolist() == [98, 99]


class Node(service.Node):
    """A store whose artifact makes every key of the source's layer 1 of the token before, unchanged."""

    def __init__(self, tmp_path) -> None:
        super().__init__(tmp_path)
        folder = tmp_path / "artifact"
        plain = Artifact.load(folder)
        eye = torch.eye(service.DIM).repeat(service.HEADS, 1, 1)
        back = [
            AffineMap((service.SMALL.layers + 1,), eye.clone(), torch.zeros(eye.shape[:2]))
            for _ in plain.maps.k
        ]
        plans = [LayerPlan.of(one, 1e-4) for one in back]
        manifest = plain.manifest.model_copy(update={"k": plans, "files": {}})
        Artifact(manifest, CacheMap(back, plain.maps.v), plain._sinks).save(folder)
        config = service.MapperConfig(self.store.root, 1 << 24, [folder])
        self.client = service.TestClient(service.create_app(config))

    def key(self, name: str, position: int, extra_key: str | None = None) -> torch.Tensor:
        """Layer 1's key [kv_heads, head_dim] as it was before its rotation."""
        page, row = divmod(position, service.PAGE)
        key = self.read(name, page, extra_key)[0][1, 0, row]
        rotary = Artifact.load(self.store.root.parent / "artifact").compile()._source
        return rotary.undo(key[None, None].float(), torch.tensor([position]))[0, 0]


@pytest.mark.parametrize("chunk", [32, 2])
def test_a_page_is_mapped_after_the_last_token_of_the_page_before(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("mapper.service.transfer._CHUNK_PAGES", chunk)
    node = Node(tmp_path)
    node.compute("small", range(10))
    node.compute("large", [0, 4])
    assert node.transfer()["mapped_tokens"] == 7 * service.PAGE
    for position in (4, 5, 8, 15, 20, 21, 32):
        found = node.key("large", position, service.LOSSY)
        assert torch.allclose(found, node.key("small", position - 1), atol=1e-4), position


def test_what_is_before_may_be_mapped_or_missing(tmp_path):
    node = Node(tmp_path)
    node.compute("small", [2, 6])
    layout = PageLayout.of(service.SMALL)
    node.store.put(layout, node.keys("small")[1], torch.randn(layout.shape), Provenance.MAPPED)
    node.compute("large", [0, 1, 3, 4, 5])
    assert node.transfer()["mapped_tokens"] == 2 * service.PAGE
    assert torch.allclose(node.key("large", 8, service.LOSSY), node.key("small", 7), atol=1e-4)
    assert torch.allclose(node.key("large", 25, service.LOSSY), node.key("small", 24), atol=1e-4)
    assert torch.allclose(node.key("large", 24, service.LOSSY), node.key("small", 24), atol=1e-4)


def test_sums_of_heads_alone_look_back_within_them() -> None:
    moments = Moments.empty(SHAPE, "a->b", head_local=True)
    source, target = induction(60).rows(1, look_back=True)
    moments.add("d", source, target, tokens=60)
    whole = moments_of(induction(60))
    for layers in ((1, LAYERS + 1), (2,)):
        ours, theirs = (
            fit_layer(one, "k", layers, 0, head_local=True, ridge=1e-4) for one in (moments, whole)
        )
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-5)
    assert by_head(source["k"]).shape == (HEADS, 59, 2 * LAYERS, WIDTH)
