"""Calibration on pages that two live workers computed of the same prompt, in a tenant's own namespace."""

from __future__ import annotations

import time

import pytest

from mapper import calibrate
from mapper.artifact import Artifact
from mapper.demo.artifacts import KV_DTYPE, PAGE_SIZE
from mapper.demo.dialogues import PROSE_FILE
from mapper.keys import Namespace, page_keys
from mapper.spec import ModelSpec
from mapper.store.directory import DirectoryStore
from mapper.store.page import PageLayout
from tests.e2e.talk import ask_worker, token_ids

pytestmark = pytest.mark.e2e
SALT = "calibrated"


def test_rows_come_from_what_both_workers_computed(real_stack, document, tmp_path):
    messages = [{"role": "user", "content": f"Calibration. {document}"}]
    for tier in ("small", "large"):
        ask_worker(real_stack, tier, messages, cache_salt=SALT).raise_for_status()
    ids = token_ids(real_stack, "small", messages)
    keys = set(page_keys(ids, PAGE_SIZE, Namespace(cache_salt=SALT)))
    store = real_stack.config.store_folder
    _wait_for(store, keys)

    def fit(name: str, **options) -> int:
        out = calibrate.run(
            *(real_stack.config.models[tier] for tier in ("small", "large")),
            [PROSE_FILE],
            tmp_path / name,
            method="head-local",
            k=1,
            tokens=400,
            native_tail=0,
            page_size=PAGE_SIZE,
            kv_dtype=KV_DTYPE,
            **options,
        )
        return Artifact.load(out).manifest.calibration.rows

    plain = fit("plain")
    # Position 0 is never mapped, so that its row is not fitted.
    assert fit("live", from_store=store, tenants=(SALT,)) == plain + PAGE_SIZE * len(keys) - 1
    assert fit("other", from_store=store, tenants=("somebody else",)) == plain


def _wait_for(folder, keys: set[str]) -> None:
    """The workers write their pages after they have answered."""
    store = DirectoryStore(folder, 1 << 40)
    for _ in range(100):
        layouts = [
            PageLayout.of(ModelSpec.model_validate(one["spec"]), 0, one["tp_size"])
            for one in store.announced()
        ]
        if len(layouts) == 2 and all(keys <= store.keys(layout) for layout in layouts):
            return
        time.sleep(0.1)
    raise AssertionError("pages of the prompt are missing in the store")
