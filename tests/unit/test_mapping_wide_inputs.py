"""Wide inputs: keys made of values and of the token before, values made of keys, from sums to pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mapper.artifact import Artifact, LayerPlan
from mapper.capture.model import Prefill
from mapper.capture.pairs import Pair, asked
from mapper.capture.texts import Document
from mapper.errors import BadArtifact
from mapper.methods.base import AffineMap, CacheMap, KVMap, by_head, wide_inputs
from mapper.methods.blocks import BlockSearch, fit_blocks
from mapper.methods.choose import candidates
from mapper.methods.plans import layer_map
from mapper.methods.ridge import fit_layer
from mapper.moments import KINDS, Moments, PairShape
from mapper.store import PageLayout, Provenance
from tests.unit import test_mapper_service as service

LAYERS, HEADS, WIDTH = 3, 2, 4
SHAPE = PairShape(LAYERS, 1, HEADS, WIDTH, wide=True)


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
        rows = pair.rows(1, wide=shape.wide)
        moments.add(pair.digest, *rows, tokens=len(pair.positions))
    return moments


def r2(mapped: torch.Tensor, native: torch.Tensor) -> float:
    return float(1 - (mapped - native).square().sum() / (native - native.mean(0)).square().sum())


def key_map(moments: Moments, kind: str = "k", ridge: float = 1e-6):
    search = BlockSearch(moments, kind, ridge)
    paths = [search.path(0, head, 1) for head in range(HEADS)]
    return paths, fit_blocks(moments, kind, paths, 0, ridge=ridge)


def test_what_is_the_token_befores_is_found_there_and_nowhere_else(monkeypatch) -> None:
    pair, other = induction(400), induction(50, seed=1)
    paths, keys = key_map(moments_of(pair))
    assert paths == [[(LAYERS + 1, 1)], [(2, 1)]]
    _, values = key_map(moments_of(pair), "v")
    cache = CacheMap([keys], [values])
    assert cache.looks_back(LAYERS)
    monkeypatch.setattr("mapper.methods.base.CHUNK_TOKENS", 7)
    kv_map = KVMap(cache, Still(), Still(), source_layers=LAYERS)
    k, v = kv_map.apply(other.source["k"], other.source["v"], other.positions)
    assert r2(k[0, 1:].flatten(1), other.target["k"][0, 1:].flatten(1)) > 0.999
    assert r2(v[0].flatten(1), other.target["v"][0].flatten(1)) > 0.999

    plain = replace(SHAPE, wide=False)
    _, blind = key_map(moments_of(pair, shape=plain))
    assert not CacheMap([blind], [values]).looks_back(LAYERS)
    k, _ = KVMap(CacheMap([blind], [values]), Still(), Still(), source_layers=LAYERS).apply(
        other.source["k"], other.source["v"], other.positions
    )
    assert r2(k[0, 1:, 0], other.target["k"][0, 1:, 0]) < 0.1


def test_keys_and_values_are_made_of_each_other(monkeypatch) -> None:
    """Key head 0 of the target is source layer 1's values of head 1 of the token before, value head 1 the keys of layer 0."""

    def crossed(rows: int, seed: int) -> Pair:
        pair = induction(rows, seed)
        turn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
        target = {kind: part.clone() for kind, part in pair.target.items()}
        target["k"][0, 1:, 0] = pair.source["v"][1, :-1, 1] @ turn
        # Values a thousand times smaller than keys: a ridge that is relative to both would hide them.
        target["v"][0, :, 1] = pair.source["k"][0, :, 0] @ turn
        small = {"k": pair.source["k"], "v": 1e-3 * pair.source["v"]}
        return replace(pair, source=small, target=target)

    pair, other = crossed(400, 0), crossed(50, 1)
    moments = moments_of(pair)
    (own, keys), (theirs, values) = (key_map(moments, kind, ridge=1e-4) for kind in "kv")
    assert own == [[(3 * LAYERS + 1, 1)], [(2, 1)]]
    assert theirs == [[(2, 0)], [(LAYERS, 0)]]
    monkeypatch.setattr("mapper.methods.base.CHUNK_TOKENS", 7)
    cache = CacheMap([keys], [values])
    assert cache.looks_back(LAYERS) and cache.wide(LAYERS)
    k, v = KVMap(cache, Still(), Still(), source_layers=LAYERS).apply(
        other.source["k"], other.source["v"], other.positions
    )
    assert r2(k[0, 1:].flatten(1), other.target["k"][0, 1:].flatten(1)) > 0.999
    assert r2(v[0].flatten(1), other.target["v"][0].flatten(1)) > 0.999


def test_a_row_is_followed_by_the_row_before_it() -> None:
    keys, values = torch.randn(2, 2, 5, 3, 4)
    inputs = wide_inputs(keys, values)
    for own, there in ((keys, inputs["k"][:4]), (values, inputs["k"][4:])):
        assert torch.equal(there[:2], own)
        assert torch.equal(there[2:, 1:], own[:, :-1]) and torch.equal(there[2:, 0], own[:, 0])
    assert torch.equal(inputs["v"], torch.cat((values, keys)))


def test_only_tokens_with_their_predecessor_are_fitted() -> None:
    """Pages of a store: two that follow each other, and one that stands alone."""
    pair = induction(12, positions=torch.tensor([*range(4), *range(4, 8), *range(20, 24)]))
    source, target = pair.rows(1, wide=True)
    assert source["k"].shape[1] == source["v"].shape[1] == target["k"].shape[1] == 7 + 3
    assert pair.rows(1, wide=False)[0]["k"].shape[:2] == (LAYERS, 11)
    later = induction(4, positions=torch.arange(8, 12))
    assert later.rows(1, wide=True)[0]["k"].shape[1] == 3


@pytest.mark.parametrize("wide", [True, False])
def test_one_pass_gives_both_directions(wide: bool) -> None:
    shape = replace(SHAPE, wide=wide)
    pair = induction(60)
    both = moments_of(pair, shape=shape, both=True)
    there = moments_of(pair, shape=shape)
    swapped = replace(pair, source=pair.target, target=pair.source)
    back = moments_of(swapped, shape=shape.reverse)
    for whole, theirs in ((both, there), (both.reverse("b->a"), back)):
        ours = whole.reduced(theirs.shape, head_local=False, both=False)
        assert ours.shape == theirs.shape
        for kind in KINDS:
            for name, value in theirs.sums[kind].parts.items():
                assert torch.allclose(ours.sums[kind].parts[name], value)
    for moments, is_both in ((both, True), (there, False)):
        stored = sum(t.numel() * 8 for one in moments.sums.values() for t in one.parts.values())
        assert stored == shape.bytes(both=is_both)


@pytest.mark.parametrize("layers", [2, 9])
@pytest.mark.parametrize("wide", [True, False])
def test_all_heads_of_wide_inputs_are_candidates(layers, wide) -> None:
    class Unheard:
        def score(self, layer: int, **maps):
            return type("Score", (), {"felt": 0.0})()

    shape = PairShape(layers, 1, HEADS, WIDTH, wide=wide)
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
        found_wide = [one for one in made if max(one.reads) >= layers]
        parts = {tuple(sorted({read // layers for read in one.reads})) for one in found_wide}
        whole = {"k": {(0, 1), (0, 1, 2, 3)}, "v": {(0, 1)}}
        assert parts == (whole[kind] if wide else set())
        for one in found_wide:
            assert not one.head_local
            assert {read % layers for read in one.reads} == {r for r in one.reads if r < layers}


def test_an_artifact_says_which_part_is_read_and_values_read_none_before(tmp_path) -> None:
    moments = moments_of(induction(60))
    source = service.spec("small", LAYERS)
    one = fit_layer(moments, "k", (1, LAYERS + 1), 0, head_local=False, ridge=1e-4)
    plan, tensors = LayerPlan.of(one, 1e-4), one.tensors()
    made = layer_map(source, plan, {f"k.0.{name}": t for name, t in tensors.items()}, "k.0")
    assert made.layers == (1, LAYERS + 1)
    for kind, parts in (("k", 4), ("v", 2)):
        own = {f"{kind}.0.{name}": tensor for name, tensor in tensors.items()}
        last = plan.model_copy(update={"layers": [1, parts * LAYERS - 1]})
        assert layer_map(source, last, own, f"{kind}.0").layers == (1, parts * LAYERS - 1)
        beyond = plan.model_copy(update={"layers": [1, parts * LAYERS]})
        with pytest.raises(BadArtifact, match="3 source layers"):
            layer_map(source, beyond, own, f"{kind}.0")


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
    source, target = induction(60).rows(1, wide=True)
    moments.add("d", source, target, tokens=60)
    whole = moments_of(induction(60))
    for layers in ((1, LAYERS + 1), (2,)):
        ours, theirs = (
            fit_layer(one, "k", layers, 0, head_local=True, ridge=1e-4) for one in (moments, whole)
        )
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-5)
    assert by_head(source["k"]).shape == (HEADS, 59, 4 * LAYERS, WIDTH)
