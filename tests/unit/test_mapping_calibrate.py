"""Calibration from folder to folder on a tiny pair: what it makes, what is resumed and merged, refusals."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from mapper import calibrate, cli, direction
from mapper.artifact import Artifact
from mapper.capture import accumulate
from mapper.capture.model import CapturedModel
from mapper.capture.stored import StoredPairs
from mapper.direction import TOLERANCE
from mapper.errors import CalibrationError, MapperError, UnsupportedModel
from mapper.keys import Namespace, page_keys
from mapper.methods.base import CacheMap, KVMap
from mapper.methods.mlp import fit_mlp
from mapper.methods.tail import TailPoint, choose_tail
from mapper.moments import Moments, PairShape
from mapper.quality import evaluate
from mapper.store.directory import DirectoryStore
from mapper.store.page import PageLayout, Provenance
from tests.tiny_pair import calibrated

pytestmark = pytest.mark.usefixtures("short_exam")


def test_auto_distils_and_is_evaluated(pair) -> None:
    target = CapturedModel(pair / "large")
    budget = round(0.4 * target.layer_parameters())
    out = calibrated(pair, "auto", method="auto", budget=budget, distill_seconds=4, native_tail=64)
    manifest = Artifact.load(out).manifest
    distilled = manifest.selection["distilled"]
    assert distilled["steps"] >= 1
    before, after = distilled["held_out_kl_before"], distilled["held_out_kl_after"]
    assert set(before) == {f"{kind}, tail {tail}" for kind in ("chat", "prose") for tail in (0, 64)}
    within = all(after[kind] < before[kind] + TOLERANCE for kind in before)
    assert distilled["kept"] == (within and sum(after.values()) < sum(before.values()))
    assert manifest.calibration.skipped["of another split"] == 10
    assert manifest.sink_token_ids == [1]
    assert manifest.parameters <= budget

    report = evaluate.run(
        pair / "small",
        pair / "large",
        [out],
        pair / "talks.jsonl",
        pair / "report",
        conversations=4,
    )
    measured = report["dialogues"]
    assert measured["floor: identity"]["tail 1"]["kl"] == pytest.approx(0, abs=1e-6)
    assert measured["auto"]["tail 64"]["kl"] < measured["control: random map"]["tail 1"]["kl"]
    assert Artifact.load(out).manifest.quality["conversations"] == 4


def test_the_sink_table_is_the_targets_own_cache(pair) -> None:
    artifact = Artifact.load(calibrated(pair, "sink", method="head-local", k=1))
    target = CapturedModel(pair / "large")
    native = target.prefill(torch.tensor([1, 40, 41]))
    k, v = artifact.sink(1)
    assert torch.allclose(k, native.k[:, 0], atol=1e-6)
    assert torch.allclose(v, native.v[:, 0], atol=1e-6)


@pytest.mark.parametrize("method", ["head-local", "blocks"])
def test_two_halves_merged_equal_the_whole(pair, method: str) -> None:
    """The other half may hold more sums than are needed."""
    whole = Artifact.load(calibrated(pair, "whole", method="head-local", k=1))
    other = calibrated(pair, "prose", texts=("prose.txt",), method=method, k=1)
    halves = calibrated(
        pair, "halves", texts=("talks.jsonl",), method="head-local", k=1,
        merge=[calibrate.checkpoint_path(other)],
    )  # fmt: skip
    merged = Artifact.load(halves)
    assert merged.manifest.calibration.rows == whole.manifest.calibration.rows
    for ours, theirs in zip(merged.maps.k, whole.maps.k, strict=True):
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-4)


def test_several_parts_are_merged(pair) -> None:
    texts = (pair / "prose.txt").read_text().split("\n\n\n")
    (pair / "one.txt").write_text("\n\n\n".join(texts[::2]))
    (pair / "other.txt").write_text("\n\n\n".join(texts[1::2]))
    options = {"method": "head-local", "k": 1, "native_tail": 0}

    def rows(out) -> int:
        return Artifact.load(out).manifest.calibration.rows

    apart = [
        calibrated(pair, name, texts=(text,), **options)
        for name, text in (("one", "one.txt"), ("other", "other.txt"), ("own", "talks.jsonl"))
    ]
    parts = [calibrate.checkpoint_path(out) for out in apart[:2]]
    whole = calibrated(pair, "three", texts=("talks.jsonl",), merge=parts, **options)
    assert rows(whole) == sum(map(rows, apart)) and all(map(rows, apart))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 2}, "part.moments is of another pair"),
        ({"method": "all-head"}, "part.moments has fewer sums"),
        ({"reverse": "part-back"}, "part.moments has fewer sums"),
        ({"texts": ("prose.txt",)}, "part.moments: 20 of its documents are in this run's text"),
        ({"merge": 2}, "part.moments: 20 of its documents .* in another file"),
    ],
)
def test_moments_that_cannot_be_merged_are_refused_before_the_pass(
    pair, monkeypatch, options, message
) -> None:
    part = calibrate.checkpoint_path(pair / "part")
    if not part.exists():
        calibrated(pair, "part", texts=("prose.txt",), method="head-local", k=1)
    monkeypatch.setattr(calibrate, "CapturedModel", lambda *a, **k: pytest.fail("it was loaded"))
    options = {"texts": ("talks.jsonl",), "method": "head-local", "k": 1, "merge": 1} | options
    if "reverse" in options:
        options["reverse"] = pair / options["reverse"]
    with pytest.raises(CalibrationError, match=message):
        calibrated(pair, "never", **options | {"merge": [part] * options["merge"]})


@pytest.mark.parametrize("reverse", [None, "back"])
def test_a_finished_pass_is_resumed_without_running_the_models(pair, monkeypatch, reverse) -> None:
    """The sums of one direction are among those of both."""
    both = {} if reverse is None else {"reverse": pair / reverse}
    calibrate.checkpoint_path(pair / "again").unlink(missing_ok=True)
    first = Artifact.load(calibrated(pair, "again", method="head-local", k=1, **both))
    before = Moments.load(calibrate.checkpoint_path(pair / "again"))
    seen = []
    capture = accumulate.capture
    monkeypatch.setattr(
        accumulate,
        "capture",
        lambda s, t, documents: (seen.append(len(documents)), capture(s, t, documents))[1],
    )
    second = Artifact.load(calibrated(pair, "again", method="head-local", k=1))
    assert seen == [0] and before.rows == second.manifest.calibration.rows
    assert torch.equal(first.maps.v[2].weight, second.maps.v[2].weight)


@pytest.mark.parametrize(
    ("fuller", "options"),
    [
        ({"method": "head-local", "reverse": True}, {"method": "head-local"}),
        ({"method": "blocks", "reverse": True}, {"method": "blocks", "narrow": True}),
        ({"method": "blocks"}, {"method": "head-local"}),
    ],
)
def test_a_run_that_needs_fewer_sums_leaves_the_fuller_ones(pair, fuller, options) -> None:
    """And finds its own among them."""
    options = {"k": 1, "native_tail": 0} | options
    fresh = Artifact.load(calibrated(pair, "fresh", **options)).maps
    calibrate.checkpoint_path(pair / "fresh").unlink()
    if "reverse" in fuller:
        fuller = fuller | {"reverse": pair / "fuller-back"}
    checkpoint = calibrate.checkpoint_path(calibrated(pair, "fuller", k=1, native_tail=0, **fuller))
    before = checkpoint.read_bytes()
    found = Artifact.load(calibrated(pair, "fuller", **options)).maps
    assert checkpoint.read_bytes() == before
    checkpoint.unlink()
    for ours, theirs in zip((*found.k, *found.v), (*fresh.k, *fresh.v), strict=True):
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-5)


def put_pages(store, pair, ids, namespace, provenance=Provenance.COMPUTED) -> None:
    """What two live workers would have written for a prompt of these tokens."""
    for name in ("small", "large"):
        model = CapturedModel(pair / name, page_size=16)
        store.announce(
            model.spec.fingerprint, {"spec": model.spec.model_dump(mode="json"), "tp_size": 1}
        )
        prefill = model.prefill(torch.tensor(ids))
        for index, key in enumerate(page_keys(ids, 16, namespace)):
            part = slice(16 * index, 16 * index + 16)
            page = torch.stack((prefill.k[:, part], prefill.v[:, part]), dim=1).contiguous()
            store.put(PageLayout.of(model.spec), key, page, provenance)


def test_pages_of_two_workers_are_calibration_data(pair, tmp_path) -> None:
    """Only those that are proved exact: no approximate lineage, no other tenant's, no mapped page."""
    store = DirectoryStore(tmp_path / "store", 1 << 30)
    put_pages(store, pair, [1, *range(10, 57)], Namespace())
    put_pages(store, pair, [1, *range(10, 26), *range(40, 71)], Namespace())
    put_pages(store, pair, [1, *range(30, 61)], Namespace(cache_salt="a"))
    put_pages(store, pair, [1, *range(20, 51)], Namespace(extra_key="lossy:s:1"))
    put_pages(store, pair, [1, *range(25, 41)], Namespace(), Provenance.MAPPED)
    small = CapturedModel(pair / "small", page_size=16)
    large = CapturedModel(pair / "large", page_size=16)
    stored = StoredPairs(store.root, small, [small.spec, large.spec])
    pages = list(stored)
    assert [int(page.positions[0]) for page in pages] == [0, 16, 16, 32, 32]
    assert pages[0].token_ids.tolist() == [1, *range(10, 25)]
    assert stored.skipped["not proved exact"] == 4
    one = pages[3].pair((small.rotary, large.rotary))
    native = large.prefill(torch.cat([p.token_ids for p in (pages[0], pages[1], pages[3])]))
    wrong = large.prefill(torch.cat([p.token_ids for p in (pages[0], pages[2], pages[3])]))
    errors = [
        float((large.rotary.apply(one.target["k"], one.positions) - other.k[:, 32:48]).abs().max())
        for other in (native, wrong)
    ]
    assert errors[0] < 1e-5 < errors[1]

    options = {"method": "head-local", "k": 1, "native_tail": 0}
    plain = Artifact.load(calibrated(pair, "without", **options)).manifest.calibration
    added = calibrated(pair, "with", from_store=store.root, tenants=(None, "a"), **options)
    assert Artifact.load(added).manifest.calibration.rows == plain.rows + 7 * 16 - 2
    with pytest.raises(CalibrationError, match="announced itself"):
        calibrated(pair, "dtype", from_store=store.root, kv_dtype="bfloat16", **options)
    with pytest.raises(CalibrationError, match="no page store"):
        calibrated(pair, "nowhere", from_store=tmp_path / "nowhere", **options)


def test_a_stored_page_that_is_not_finite_is_left_out(pair, tmp_path) -> None:
    store = DirectoryStore(tmp_path / "store", 1 << 30)
    ids = [1, *range(10, 41)]
    put_pages(store, pair, ids, Namespace())
    small = CapturedModel(pair / "small", page_size=16)
    layout, key = PageLayout.of(small.spec), page_keys(ids, 16, Namespace())[1]
    page = store.get(layout, key)[0].clone()
    page[1, 0, 3] = float("inf")
    store.remove(layout, key)
    store.put(layout, key, page, Provenance.COMPUTED)
    stored = StoredPairs(
        store.root, small, [small.spec, CapturedModel(pair / "large", page_size=16).spec]
    )
    assert [int(one.positions[0]) for one in stored] == [0]
    assert stored.skipped["values that are not finite"] == 1


def test_rows_of_a_store_count_before_there_are_too_few(pair, tmp_path) -> None:
    store = DirectoryStore(tmp_path / "store", 1 << 30)
    options = {"method": "all-head", "k": 6, "tokens": 1, "length": 40, "native_tail": 0}
    put_pages(store, pair, [1, *range(10, 25)], Namespace())
    with pytest.raises(CalibrationError, match="more text"):
        calibrated(pair, "stored", from_store=store.root, **options)
    put_pages(store, pair, [1, *range(3, 98)], Namespace())
    out = calibrated(pair, "stored", from_store=store.root, **options)
    assert Artifact.load(out).manifest.calibration.rows > 96
    with pytest.raises(CalibrationError, match="more text"):
        calibrated(pair, "stored", **options)


def test_identity_only_for_a_model_onto_itself(pair) -> None:
    out = calibrate.run(pair / "large", pair / "large", [], pair / "same", method="identity")
    artifact = Artifact.load(out)
    k, v = torch.randn(2, 3, 5, 2, 8)
    assert torch.equal(artifact.compile().apply(k, v, torch.arange(5))[1], v)
    with pytest.raises(UnsupportedModel, match="itself"):
        calibrate.run(pair / "small", pair / "large", [], pair / "no", method="identity")


def test_too_little_text_is_refused_before_the_pass(pair, monkeypatch) -> None:
    monkeypatch.setattr(
        calibrate, "accumulate", lambda *a, **k: pytest.fail("the pass was started")
    )
    with pytest.raises(CalibrationError, match="more text"):
        calibrated(pair, "little", method="all-head", k=2, tokens=20, stride=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "full"}, "full is not empty"),
        ({"reverse": "full"}, "full is not empty"),
        ({"reverse": "no/../never"}, "choose two apart"),
        ({"reverse": "never/back"}, "choose two apart"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype: 'fp8_e4m3'"),
        ({"texts": ("empty.jsonl",)}, "empty.jsonl:1"),
        ({"method": "identity", "reverse": "back"}, "leave out --reverse"),
        ({"method": "identity", "merge": ["m"]}, "leave out --merge"),
        ({"method": "identity", "refit": "repair"}, "leave out --refit"),
        ({"method": "identity", "distill_seconds": 1}, "leave out --distill-seconds"),
        ({"method": "identity", "from_store": "s"}, "leave out --from-store"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(
    pair, monkeypatch, options, message
) -> None:
    monkeypatch.setattr(calibrate, "CapturedModel", lambda *a, **k: pytest.fail("it was loaded"))
    (pair / "full").mkdir(exist_ok=True)
    (pair / "full" / "notes.txt").write_text("mine")
    (pair / "empty.jsonl").write_text('{"messages": []}')
    if "reverse" in options:
        options = options | {"reverse": pair / options["reverse"]}
    with pytest.raises(MapperError, match=message):
        calibrated(pair, **{"out": "never"} | options)


@pytest.mark.parametrize("reverse", [None, "back"])
def test_neither_sums_nor_held_out_pairs_are_kept_while_maps_are_distilled(
    pair, monkeypatch, reverse
) -> None:
    """Together they are as large as all that distillation needs itself."""
    other = calibrated(
        pair, "other", texts=("prose.txt",), method="auto", reverse=reverse and pair / "other-back"
    )
    kept, left = [], []

    def watched(make):
        def made(*arguments, **options):
            kept.append(weakref.ref(thing := make(*arguments, **options)))
            return thing

        return made

    def distilled(maps, *rest):
        left.append([one() for one in kept if one() is not None])
        return maps, {"kept": True}

    for module, name in [
        (calibrate, "accumulate"),
        (calibrate, "_read_others"),
        (direction, "HeldOut"),
    ]:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(direction, "_distill", distilled)
    calibrated(
        pair, "there", texts=("talks.jsonl",), method="auto", native_tail=0, distill_seconds=1,
        reverse=reverse and pair / reverse, merge=[calibrate.checkpoint_path(other)],
    )  # fmt: skip
    assert left == [[]] * (2 if reverse else 1)
    assert len(kept) == 2 + 2 * len(left)


@pytest.mark.parametrize(("budget", "spent"), [(None, 100), (7, 7), (0, 0)])
def test_only_no_budget_is_the_usual_one(monkeypatch, budget, spent) -> None:
    """An eighth of the target layers' parameters."""

    def fit(*arguments, budget, **options):
        raise CalibrationError(f"{budget} to spend")

    monkeypatch.setattr(direction, "fit", fit)
    options = direction.Options("auto", 1, 1e-4, budget, None, 0, 0)
    moments = Moments.empty(PairShape(2, 3, 2, 8), "a->b")
    models = [None, SimpleNamespace(layer_parameters=lambda: 800)]
    with pytest.raises(CalibrationError, match=f"^{spent} to spend"):
        direction._fit(models, None, moments, None, options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--native-tail", "-1"),
        ("--k", "0"),
        ("--budget", "0"),
        ("--tokens", "0"),
        ("--distill-seconds", "-1"),
        ("--ridge", "0"),
        ("--kv-dtype", "fp8_e4m3"),
    ],
)
def test_values_out_of_range_are_refused_by_the_command(monkeypatch, option, value) -> None:
    monkeypatch.setattr(calibrate, "run", lambda *a, **k: pytest.fail("it was started"))
    result = CliRunner().invoke(cli.app, ["calibrate", "a", "b", "c", "--text", "t", option, value])
    assert result.exit_code == 2
    assert option in result.output


def test_both_directions_from_one_pass(pair, monkeypatch) -> None:
    passes = []
    capture = accumulate.capture
    monkeypatch.setattr(
        accumulate, "capture", lambda *models: (passes.append(1), capture(*models))[1]
    )
    options = {"method": "blocks", "k": 2, "native_tail": 16}
    there = Artifact.load(calibrated(pair, "there", reverse=pair / "back", **options)).manifest
    back = Artifact.load(pair / "back").manifest
    assert passes == [1]
    assert (back.source, back.target) == (there.target, there.source)
    alone = calibrate.run(
        pair / "large", pair / "small", [pair / "talks.jsonl", pair / "prose.txt"],
        pair / "alone", length=200, held_out=0.25, **options,
    )  # fmt: skip
    ours, theirs = Artifact.load(pair / "back").maps, Artifact.load(alone).maps
    assert [one.blocks for one in ours.k] == [one.blocks for one in theirs.k]
    assert torch.allclose(ours.v[1].weight, theirs.v[1].weight, atol=1e-3)


@pytest.mark.parametrize("method", ["repair", "attention"])
def test_a_refit_is_taken_where_it_lowers_the_held_out_error(pair, method: str) -> None:
    options = {"method": "head-local", "k": 2, "native_tail": 0}
    plain = Artifact.load(calibrated(pair, "plain", **options))
    refitted = Artifact.load(calibrated(pair, method, refit=method, **options))
    assert refitted.manifest.method == f"head-local+{method}"
    assert refitted.manifest.parameters == plain.manifest.parameters
    before, after = (one.manifest.selection["attention_output_error"] for one in (plain, refitted))
    assert sum(after) < sum(before)
    layers = zip((*plain.maps.k, *plain.maps.v), (*refitted.maps.k, *refitted.maps.v), strict=True)
    assert not all(torch.equal(one.weight, other.weight) for one, other in layers)


def test_a_network_is_not_refitted(pair) -> None:
    with pytest.raises(CalibrationError, match="linear"):
        calibrated(pair, "bent", method="mlp", refit="repair")
    with pytest.raises(CalibrationError, match="linear"):
        calibrated(pair, "bent", method="mlp", distill_seconds=1)


def test_a_network_is_saved_and_maps_the_same(pair, monkeypatch) -> None:
    fitted = []

    def small(*arguments):
        fitted.append(fit_mlp(*arguments, hidden=16, steps=20))
        return fitted[-1]

    monkeypatch.setattr("mapper.methods.fit.fit_mlp", small)
    artifact = Artifact.load(calibrated(pair, "mlp", method="mlp", k=2, native_tail=0))
    assert artifact.manifest.k[0].form == "mlp"
    k, v = torch.randn(2, 2, 5, 2, 8)
    rotaries = (CapturedModel(pair / name).rotary for name in ("small", "large"))
    as_fitted = KVMap(CacheMap(fitted[:3], fitted[3:]), *rotaries, source_layers=2)
    expected = as_fitted.apply(k, v, torch.arange(5))
    for ours, theirs in zip(artifact.compile().apply(k, v, torch.arange(5)), expected, strict=True):
        assert ours.shape == (3, 5, 2, 8)
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("narrow", [True, False])
def test_narrow_maps_read_their_own_kind_and_token_alone(pair, narrow) -> None:
    out = calibrated(pair, f"narrow-{narrow}", method="blocks", k=4, narrow=narrow, native_tail=0)
    moments = Moments.load(accumulate.checkpoint_path(out))
    assert moments.shape.wide != narrow
    artifact = Artifact.load(out)
    assert artifact.maps.wide(artifact.manifest.source.layers) != narrow


def test_the_native_tail_is_measured_on_the_calibrations_own_text(pair) -> None:
    manifest = Artifact.load(calibrated(pair, "tail", method="head-local", k=1)).manifest
    curve = manifest.selection["native_tail"]
    assert [point["tail"] for point in curve] == [0, 16, 32, 64, 128]
    assert all(point["ms"] > 0 for point in curve)
    assert curve[-1]["kl"] < curve[0]["kl"]
    assert manifest.native_tail == choose_tail([TailPoint(**point) for point in curve])
