"""Chooses the layers that the small model leaves out: one at a time, the one whose loss costs least on sample text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.progress import Progress
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from . import texts
from .layers import run_layers
from .models import build_large

REPORT_FILE = Path(__file__).parent / "prune_report.json"


def sample_rows(tokenizer, prose: Path | None, rows: int, length: int, seed: int) -> torch.Tensor:
    """As many rows of dialogue as of prose, drawn from training text, so that the held-out text stays unseen."""
    generator = torch.Generator().manual_seed(seed)
    prose_source = (
        texts.file_rows(tokenizer, prose, length)
        if prose
        else texts.prose_rows(tokenizer, "train", length)
    )
    sources = (texts.dialogue_rows(tokenizer, "train", length), prose_source)
    return torch.cat(
        [source[torch.randperm(len(source), generator=generator)[:rows]] for source in sources]
    )


def prune(
    count: int, prose: Path | None, rows: int = 3, length: int = 128, pool: int = 15, seed: int = 0
) -> tuple[int, ...]:
    """Removes `count` layers of the large model and writes the report; returns the layers in ascending order."""
    folder = build_large()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = sample_rows(AutoTokenizer.from_pretrained(folder), prose, rows, length, seed)
    base, steps = greedy(model, ids, count, pool)
    report = {
        "sample": {
            "tokens": ids.numel(),
            "rows_of_each_kind": rows,
            "length": length,
            "seed": seed,
        },
        "candidates_after_the_first_removal": pool,
        "loss_of_the_full_model": base,
        "loss_added_by_each_layer_alone": steps[0]["losses"],
        "order": [
            {"layer": step["layer"], "loss": step["losses"][step["layer"]]} for step in steps
        ],
    }
    REPORT_FILE.write_text(json.dumps(report, indent=2) + "\n")
    return tuple(sorted(step["layer"] for step in steps))


@torch.no_grad()
def greedy(
    model: LlamaForCausalLM, ids: torch.Tensor, count: int, pool: int
) -> tuple[float, list[dict]]:
    """The full model's loss, and for each removal the layer taken and the losses of all that could have been taken.

    After the first removal only the `pool` layers that cost least alone are tried: what hurts alone hurts later too.
    """
    kept = list(range(len(model.model.layers)))
    candidates = set(kept)
    embedded = model.model.embed_tokens(ids)
    base = _loss(model, run_layers(model, embedded, model.model.layers), ids)
    steps: list[dict] = []
    with Progress() as progress:
        task = progress.add_task(
            "pruning", total=len(kept) + sum(pool - done for done in range(1, count))
        )
        for _ in range(count):
            losses = {}
            # everything before the candidate is the same for all later candidates: computed once
            before = embedded
            for place, layer in enumerate(kept):
                if layer in candidates:
                    rest = [model.model.layers[other] for other in kept[place + 1 :]]
                    losses[layer] = _loss(model, run_layers(model, before, rest), ids)
                    progress.advance(task)
                before = run_layers(model, before, [model.model.layers[layer]])
            cheapest = sorted(losses, key=losses.__getitem__)
            layer = cheapest[0]
            kept.remove(layer)
            candidates = (set(cheapest[:pool]) if not steps else candidates) - {layer}
            steps.append({"layer": layer, "losses": losses})
            progress.console.print(
                f"removed layer {layer}: loss {losses[layer]:.3f} (full model {base:.3f})"
            )
    return base, steps


def _loss(model: LlamaForCausalLM, hidden: torch.Tensor, ids: torch.Tensor) -> float:
    logits = model.lm_head(model.model.norm(hidden[:, :-1]))
    return cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1)
    ).item()
