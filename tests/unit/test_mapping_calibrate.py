"""Calibration and evaluation from folder to folder on a tiny pair: choices, resumption, refusals."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    Olmo2Config,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from mapper import calibrate, cli, direction
from mapper.artifact import Artifact
from mapper.capture import accumulate
from mapper.capture.model import CapturedModel, build_cache
from mapper.capture.stored import StoredPairs, recognise, value_table
from mapper.capture.texts import Document, read_documents, render
from mapper.direction import TOLERANCE
from mapper.errors import CalibrationError, MapperError, UnsupportedModel
from mapper.keys import Namespace, page_keys
from mapper.methods import distill
from mapper.methods.base import CacheMap, KVMap
from mapper.methods.mlp import fit_mlp
from mapper.methods.tail import TailPoint, choose_tail
from mapper.moments import Moments, PairShape
from mapper.quality import evaluate
from mapper.store.directory import DirectoryStore
from mapper.store.page import PageLayout, Provenance
from tests.tiny_pair import say, write_dialogues, write_model, write_prose


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_model(root / "small", 2, 0, spread=0.02)
    write_model(root / "large", 3, 1, spread=0.02)
    write_dialogues(root / "talks.jsonl")
    write_prose(root / "prose.txt", 48)
    return root


@pytest.fixture(autouse=True)
def short_exam(monkeypatch) -> None:
    """Ten documents of a kind tell as much as a hundred of this size."""
    monkeypatch.setattr(calibrate, "EXAM_TOKENS", 2000)


def fit(pair, out: str, texts=("talks.jsonl", "prose.txt"), **options):
    paths = [pair / name for name in texts]
    options = {"length": 200, "held_out": 0.25} | options
    return calibrate.run(pair / "small", pair / "large", paths, pair / out, **options)


def test_auto_distils_and_is_evaluated(pair) -> None:
    target = CapturedModel(pair / "large")
    budget = round(0.4 * target.layer_parameters())
    out = fit(pair, "auto", method="auto", budget=budget, distill_seconds=4, native_tail=64)
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
    artifact = Artifact.load(fit(pair, "sink", method="head-local", k=1))
    target = CapturedModel(pair / "large")
    native = target.prefill(torch.tensor([1, 40, 41]))
    k, v = artifact.sink(1)
    assert torch.allclose(k, native.k[:, 0], atol=1e-6)
    assert torch.allclose(v, native.v[:, 0], atol=1e-6)


def test_two_halves_merged_equal_the_whole(pair) -> None:
    whole = Artifact.load(fit(pair, "whole", method="head-local", k=1))
    other = fit(pair, "prose", texts=("prose.txt",), method="head-local", k=1)
    halves = fit(
        pair, "halves", texts=("talks.jsonl",), method="head-local", k=1,
        merge=[calibrate.checkpoint_path(other)],
    )  # fmt: skip
    merged = Artifact.load(halves)
    assert merged.manifest.calibration.rows == whole.manifest.calibration.rows
    for ours, theirs in zip(merged.maps.k, whole.maps.k, strict=True):
        assert torch.allclose(ours.weight, theirs.weight, atol=1e-4)


@pytest.mark.parametrize("reverse", [None, "back"])
def test_a_finished_pass_is_resumed_without_running_the_models(pair, monkeypatch, reverse) -> None:
    """The sums of one direction are among those of both."""
    both = {} if reverse is None else {"reverse": pair / reverse}
    calibrate.checkpoint_path(pair / "again").unlink(missing_ok=True)
    first = Artifact.load(fit(pair, "again", method="head-local", k=1, **both))
    before = Moments.load(calibrate.checkpoint_path(pair / "again"))
    seen = []
    capture = accumulate.capture
    monkeypatch.setattr(
        accumulate,
        "capture",
        lambda s, t, documents: (seen.append(len(documents)), capture(s, t, documents))[1],
    )
    second = Artifact.load(fit(pair, "again", method="head-local", k=1))
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
    fresh = Artifact.load(fit(pair, "fresh", **options)).maps
    calibrate.checkpoint_path(pair / "fresh").unlink()
    if "reverse" in fuller:
        fuller = fuller | {"reverse": pair / "fuller-back"}
    checkpoint = calibrate.checkpoint_path(fit(pair, "fuller", k=1, native_tail=0, **fuller))
    before = checkpoint.read_bytes()
    found = Artifact.load(fit(pair, "fuller", **options)).maps
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
    plain = Artifact.load(fit(pair, "without", **options)).manifest.calibration
    added = fit(pair, "with", from_store=store.root, tenants=(None, "a"), **options)
    assert Artifact.load(added).manifest.calibration.rows == plain.rows + 7 * 16 - 2
    with pytest.raises(CalibrationError, match="announced itself"):
        fit(pair, "dtype", from_store=store.root, kv_dtype="bfloat16", **options)
    with pytest.raises(CalibrationError, match="no page store"):
        fit(pair, "nowhere", from_store=tmp_path / "nowhere", **options)


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
        fit(pair, "stored", from_store=store.root, **options)
    put_pages(store, pair, [1, *range(3, 98)], Namespace())
    out = fit(pair, "stored", from_store=store.root, **options)
    assert Artifact.load(out).manifest.calibration.rows > 96
    with pytest.raises(CalibrationError, match="more text"):
        fit(pair, "stored", **options)


def test_a_token_is_recognised_after_rounding(pair) -> None:
    model = CapturedModel(pair / "small")
    ids = torch.arange(5, 37)
    values = model.prefill(ids).v[0]
    table = value_table(model)
    assert torch.equal(recognise(table, values.bfloat16().float()), ids)
    assert not torch.equal(recognise(table, values.flip(1)), ids)


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
        fit(pair, "little", method="all-head", k=2, tokens=20, stride=8)


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
        fit(pair, **{"out": "never"} | options)


@pytest.mark.parametrize(("budget", "spent"), [(None, 100), (7, 7), (0, 0)])
def test_only_no_budget_is_the_usual_one(monkeypatch, budget, spent) -> None:
    """An eighth of the target layers' parameters."""

    def fit(*arguments, budget, **options):
        raise CalibrationError(f"{budget} to spend")

    monkeypatch.setattr(direction, "fit", fit)
    options = direction.Options("auto", 1, 1e-4, budget, None, 0, 0, {})
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


def write_other_model(folder, config) -> None:
    write_model(folder, 1, 0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("write", "field", "reason"),
    [
        (
            lambda folder: LlavaConfig(text_config=LlamaConfig(**TINY)).save_pretrained(folder),
            "architecture",
            "'llava' checkpoint",
        ),
        (
            lambda folder: write_other_model(folder, GPTNeoXConfig(**TINY)),
            "architecture",
            "layers.0.self_attn.o_proj",
        ),
        (
            lambda folder: write_other_model(folder, Olmo2Config(**TINY)),
            "k_norm",
            r"layer 0 of 'olmo2' has the shape \[32\]",
        ),
    ],
)
def test_models_whose_attention_cannot_be_captured_are_refused(
    tmp_path, write, field, reason
) -> None:
    write_model(tmp_path, 1, 0)
    write(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        CapturedModel(tmp_path)
    assert refused.value.field == field


def test_non_finite_activations_are_refused(pair) -> None:
    model = CapturedModel(pair / "large")
    with torch.no_grad():
        model.model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"non-finite values of the .* 'w3 w4 w5 w6'"):
        model.prefill(torch.arange(10, 14))


def test_a_captured_query_reproduces_the_models_attention(pair) -> None:
    """q . k of a captured query with the cache gives the attention that the model computes."""
    model = CapturedModel(pair / "large")
    ids = torch.arange(1, 40)
    prefill = model.prefill(ids, torch.tensor([38]))
    outputs = []
    hook = model.model.model.layers[2].self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: outputs.append(inputs[0][0, -1])
    )
    with torch.no_grad():
        model.model(
            input_ids=ids[None, -1:],
            past_key_values=build_cache(prefill.k[:, :-1], prefill.v[:, :-1]),
        )
    hook.remove()
    query, k, v = prefill.queries[2, 0], prefill.k[2], prefill.v[2]
    weights = torch.einsum("hgd,nhd->hgn", query.view(2, 2, 8), k).softmax(-1)
    ours = torch.einsum("hgn,nhd->hgd", weights, v).flatten()
    assert torch.allclose(ours, outputs[0], atol=1e-5)


def test_both_directions_from_one_pass(pair, monkeypatch) -> None:
    passes = []
    capture = accumulate.capture
    monkeypatch.setattr(
        accumulate, "capture", lambda *models: (passes.append(1), capture(*models))[1]
    )
    options = {"method": "blocks", "k": 2, "native_tail": 16}
    there = Artifact.load(fit(pair, "there", reverse=pair / "back", **options)).manifest
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
    plain = Artifact.load(fit(pair, "plain", **options))
    refitted = Artifact.load(fit(pair, method, refit=method, **options))
    assert refitted.manifest.method == f"head-local+{method}"
    assert refitted.manifest.parameters == plain.manifest.parameters
    before, after = (one.manifest.selection["attention_output_error"] for one in (plain, refitted))
    assert sum(after) < sum(before)
    layers = zip((*plain.maps.k, *plain.maps.v), (*refitted.maps.k, *refitted.maps.v), strict=True)
    assert not all(torch.equal(one.weight, other.weight) for one, other in layers)


def test_a_network_is_not_refitted(pair) -> None:
    with pytest.raises(CalibrationError, match="linear"):
        fit(pair, "bent", method="mlp", refit="repair")
    with pytest.raises(CalibrationError, match="linear"):
        fit(pair, "bent", method="mlp", distill_seconds=1)


def test_a_network_is_saved_and_maps_the_same(pair, monkeypatch) -> None:
    fitted = []

    def small(*arguments):
        fitted.append(fit_mlp(*arguments, hidden=16, steps=20))
        return fitted[-1]

    monkeypatch.setattr("mapper.methods.fit.fit_mlp", small)
    artifact = Artifact.load(fit(pair, "mlp", method="mlp", k=2, native_tail=0))
    assert artifact.manifest.k[0].form == "mlp"
    k, v = torch.randn(2, 2, 5, 2, 8)
    rotaries = (CapturedModel(pair / name).rotary for name in ("small", "large"))
    as_fitted = KVMap(CacheMap(fitted[:3], fitted[3:]), *rotaries, source_layers=2)
    expected = as_fitted.apply(k, v, torch.arange(5))
    for ours, theirs in zip(artifact.compile().apply(k, v, torch.arange(5)), expected, strict=True):
        assert ours.shape == (3, 5, 2, 8)
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_kinds_of_text_with_a_small_kl_are_not_drowned() -> None:
    """Thirty times the loss, five times the part in the gradient; what has fallen counts more than before."""
    balance = distill.Balance()
    loud, quiet = (("recall", 0), 0.36), (("chat", 64), 0.012)
    parts = [one[1] * balance.weight(*one) for one in (loud, quiet)]
    assert parts == pytest.approx([0.36**0.5, 0.012**0.5])
    once = balance.weight(("recall", 0), 0.36)
    for _ in range(200):
        later = balance.weight(("recall", 0), 0.09)
    assert later == pytest.approx(2 * once, rel=0.01)
    assert balance.weight(*quiet) == pytest.approx(0.012**-0.5)
    assert balance.weight(("prose", 0), 0.0) == 100


@pytest.mark.parametrize("narrow", [True, False])
def test_narrow_maps_read_their_own_kind_and_token_alone(pair, narrow) -> None:
    out = fit(pair, f"narrow-{narrow}", method="blocks", k=4, narrow=narrow, native_tail=0)
    moments = Moments.load(accumulate.checkpoint_path(out))
    assert moments.shape.wide != narrow
    artifact = Artifact.load(out)
    assert artifact.maps.wide(artifact.manifest.source.layers) != narrow


def test_distillation_rehearses_quotes_where_the_text_has_sentences(pair) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = (" ".join(f"{say(generator, 9)} ." for _ in range(18)) for _ in range(24))
    (pair / "sentences.txt").write_text("\n\n\n".join(texts))
    out = fit(pair, "quotes", texts=("sentences.txt",), method="head-local", k=1,
              distill_seconds=1, native_tail=0)  # fmt: skip
    distilled = Artifact.load(out).manifest.selection["distilled"]
    kinds = {name.split(",")[0] for name in distilled["held_out_kl_before"]}
    assert kinds == {"prose", "recall"}


def test_all_kinds_of_documents_are_taught_however_few_there_are() -> None:
    def some(kind: str, count: int) -> list[Document]:
        return [Document(f"{kind}{at}", kind, torch.arange(4), kind) for at in range(count)]

    generator = torch.Generator().manual_seed(0)
    mixed = distill._mixed(some("chat", 40) + some("prose", 2), generator)
    drawn = list(itertools.islice(mixed, 60))
    assert [document.kind for document in drawn[:6]] == ["chat", "chat", "prose"] * 2
    assert len({document.digest for document in drawn if document.kind == "chat"}) == 40
    assert {document.digest for document in drawn[:6] if document.kind == "prose"} == {
        "prose0",
        "prose1",
    }


def test_the_native_tail_is_measured_on_the_calibrations_own_text(pair) -> None:
    manifest = Artifact.load(fit(pair, "tail", method="head-local", k=1)).manifest
    curve = manifest.selection["native_tail"]
    assert [point["tail"] for point in curve] == [0, 16, 32, 64, 128]
    assert all(point["ms"] > 0 for point in curve)
    assert curve[-1]["kl"] < curve[0]["kl"]
    assert manifest.native_tail == choose_tail([TailPoint(**point) for point in curve])


def test_hand_overs_of_one_batch_equal_separate_continuations(pair, monkeypatch) -> None:
    """Positions, masks and tails of the shared pass, against a plain cache for each hand-over."""
    monkeypatch.setattr(distill, "fastest_dtype", lambda: torch.float32)
    monkeypatch.setattr(distill, "WINDOW", 12)
    artifact = Artifact.load(fit(pair, "plain", method="head-local", k=2, native_tail=0))
    models = [CapturedModel(pair / name) for name in ("small", "large")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    documents, _ = read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)
    classroom = distill.Classroom(*models, wide=False)
    lesson = classroom.lesson(documents[0])
    ids = lesson.document.ids
    pupils = {kind: list(map(distill.Pupil, getattr(artifact.maps, kind))) for kind in "kv"}
    theirs, native = (model.prefill(ids) for model in models)
    mapped = artifact.compile().apply(theirs.k, theirs.v, torch.arange(len(ids)))
    k, v = (tensor.clone() for tensor in mapped)
    k[:, 0], v[:, 0] = native.k[:, 0], native.v[:, 0]
    places = [40, 97, len(ids) - 5]
    with torch.no_grad():
        wanted = models[1].model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for tail in (0, 8):
            divergences = []
            for place in places:
                start = place - tail
                cache = build_cache(k[:, :start], v[:, :start])
                rest = ids[None, start : place + 12]
                found = models[1].model(input_ids=rest, past_key_values=cache).logits[0, tail:]
                native_part = wanted[place : place + 12]
                difference = native_part - found.log_softmax(-1)
                divergences.append((native_part.exp() * difference).sum(-1))
            ours = classroom.loss(pupils, None, lesson, places, tail=tail)
            assert float(ours) == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-3)
        judged = distill.evaluate(artifact.maps, classroom, documents[:3], (8, 0))
        for tail in (0, 8):
            each = [
                float(classroom.loss(pupils, None, classroom.lesson(one), places, tail=tail))
                for one in documents[:3]
                for places in [distill.exam_places(one)]
            ]
            assert judged["chat", tail] == pytest.approx(sum(each) / 3, rel=1e-4)


def test_hand_overs_are_first_of_all_where_a_question_follows_up() -> None:
    answers, follow_ups = (40, 60, 80, 100, 120, 140), (80, 140)
    chat = Document("chat", "chat", torch.arange(300), "chat", answers, follow_ups)
    generator = torch.Generator().manual_seed(0)
    others = set()
    for _ in range(40):
        one, other, *random_ones = distill._hand_overs(chat, 4, generator)
        assert {one, other} == set(follow_ups) and len(random_ones) == 2
        places = distill._hand_overs(chat, 8, generator)
        assert set(places[:2]) == set(follow_ups) and set(places[2:4]) <= set(answers)
        others |= set(places[2:4])
    assert others == set(answers) - set(follow_ups)


def test_a_distilled_map_is_judged_by_more_text_than_is_kept_in_memory(pair, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "HELD_OUT_TOKENS", 400)
    monkeypatch.setattr(calibrate, "EXAM_TOKENS", 1000)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    paths = [pair / "talks.jsonl", pair / "prose.txt"]
    text = calibrate._read_text(paths, tokenizer, 4000, 200, 0.4)
    assert len(text.exam) > len(text.held_out)
    assert {one.kind for one in text.exam} == {"chat", "prose"}
    learned = {one.origin for one in (*text.fit, *text.lessons)}
    assert not learned & {one.origin for one in (*text.held_out, *text.exam)}


def test_of_few_texts_one_is_held_out(pair, tmp_path) -> None:
    """Where chance takes some, it is those; where it takes none, the one with the smallest digest."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")

    def split(texts: int, share: float) -> tuple[set[str], set[str]]:
        generator = torch.Generator().manual_seed(2)
        path = tmp_path / "few.txt"
        path.write_text("\n\n\n".join(say(generator, 150) for _ in range(texts)))
        text = calibrate._read_text([path], tokenizer, 4000, 64, share)
        return tuple({one.origin for one in part} for part in (text.fit, text.held_out))

    fit, held = split(8, 0.4)
    limit = 0.4 * 2**32
    assert held == {one for one in fit | held if int(one[:8], 16) < limit}
    assert 1 < len(held) < 8
    fit, held = split(8, 0)
    assert held == {min(fit | held)} and len(fit) == 7
    with pytest.raises(CalibrationError, match=r"^1 text\(s\) cannot be split.*Two blank lines"):
        split(1, 0.4)


def test_a_line_of_json_may_have_any_character_in_its_strings(pair, tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    text = "\u2028w1 \u2029w2 \x85".join([say(torch.Generator(), 20)] * 3)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n\n")
    documents, _ = read_documents([tmp_path / "lines.jsonl"], tokenizer, length=200, seed=0)
    assert len(documents) == 1


@pytest.mark.parametrize(
    "item",
    [
        {"messages": []},
        {"messages": [], "text": "w1"},
        {"messages": [{"content": "w1"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": None, "content": "w1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]},
        {"text": 1},
        {},
    ],
)
def test_a_malformed_line_is_named(pair, tmp_path, item) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"text": "w1"}) + "\n" + json.dumps(item))
    with pytest.raises(CalibrationError, match=f"{path}:2: neither"):
        read_documents([path], tokenizer, length=200, seed=0)


def test_dialogues_need_a_chat_template_and_texts_do_not(pair) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    tokenizer.chat_template = None
    assert read_documents([pair / "prose.txt"], tokenizer, length=200, seed=0)[0]
    with pytest.raises(CalibrationError, match=r"talks\.jsonl: the tokenizer has no chat template"):
        read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)


def test_dialogues_are_chained_and_know_where_answers_begin(pair) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    documents, _ = read_documents([pair / "talks.jsonl"], tokenizer, length=200, seed=0)
    assert sum(len(document.ids) == 200 for document in documents) == len(documents) - 1
    opening = render(tokenizer, [{"role": "user", "content": "w1"}], reply=True)[-2:]
    for document in documents:
        assert document.kind == "chat" and len(document.answers) >= 2
        for at in document.answers:
            assert document.ids[at - 2 : at].tolist() == opening


def test_answers_to_questions_that_follow_up_are_known(pair, tmp_path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / "large")
    turns = [1, 3, 1, 2]
    ask, answer = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    lines = [json.dumps({"messages": [ask, answer] * count}) for count in turns]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    [document], _ = read_documents([tmp_path / "talks.jsonl"], tokenizer, length=2000, seed=0)
    assert len(document.answers) == sum(turns)
    assert [document.answers.index(at) for at in document.follow_ups] == [2, 3, 6]


def test_slopes_are_those_of_the_log_likelihood(pair) -> None:
    """A layer whose output nothing reads has none; the others have."""
    model = CapturedModel(pair / "large")
    ids, at = torch.arange(1, 40), torch.tensor([5, 20, 38])
    slopes = model.sensitivity(ids, at)
    assert slopes.shape == (3, 3) and float(slopes.min()) > 0
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
    assert float(model.sensitivity(ids, at).max()) == 0
