"""Command line of the demo models: build them, or run any step of the recipe that made the small one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=(
        "The demo's model pair. `build` is all that a user needs and takes seconds. The other commands made the small "
        "model, in this order: `dialogues` (the large model writes its own training text), `prune` (choose the layers "
        "to leave out), `distill` (heal what is left; again after `answers`, which the healed model gives itself), "
        "`card` (measure it). Each can be stopped and started again, "
        "except `prune` and `answers`, which take minutes; all are seeded."
    ),
)

Work = Annotated[
    Path, typer.Option(help="Folder for unfinished work; give the same one again to go on.")
]
Prose = Annotated[
    Path | None,
    typer.Option(
        help="A plain-text file of prose to use as well; without it, prose by the large model alone.",
        exists=True,
    ),
]


@app.command()
def build() -> None:
    """Build both models in the cache (BATON_CACHE, or ~/.cache/baton) and print their folders."""
    from .models import demo_models

    for name, folder in demo_models().items():
        typer.echo(f"{name}\t{folder}")


@app.command()
def dialogues(
    work: Work = Path("work/dialogues"),
    batches: Annotated[
        int, typer.Option(help="Batches of 192 conversations; every fourth is prose.")
    ] = 4,
    seed: int = 0,
) -> None:
    """Let the large model write dialogues.jsonl and prose.jsonl."""
    from .dialogues import generate

    generate(batches, work, seed)


@app.command()
def answers(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("work/answers.jsonl"),
    count: Annotated[int, typer.Option(help="How many of the short questions to answer.")] = 768,
    seed: int = 0,
) -> None:
    """Let the small model answer questions of the dialogues, to be corrected on its own words by `distill --own`."""
    from .dialogues import DIALOGUES_FILE, answer_as_small

    out.parent.mkdir(parents=True, exist_ok=True)
    answer_as_small(DIALOGUES_FILE, count, out, seed)


@app.command()
def prune(
    count: Annotated[int, typer.Option(help="How many of the 30 layers to remove.")] = 9,
    prose: Prose = None,
    rows: Annotated[
        int, typer.Option(help="Rows of dialogue, and of prose, that the loss is measured on.")
    ] = 3,
    seed: int = 0,
) -> None:
    """Choose the layers to remove and write them into the recipe (which then has no update until `distill` ends)."""
    from .prune import prune as choose
    from .update import Recipe

    Recipe(choose(count, prose, rows=rows, seed=seed), None).write()


@app.command()
def distill(
    work: Work = Path("work/distill"),
    prose: Prose = None,
    steps: Annotated[
        int, typer.Option(help="Training steps in all, those already done included.")
    ] = 1000,
    rank: Annotated[int, typer.Option(help="Rank of the update of each linear layer.")] = 24,
    learning_rate: float = 2e-3,
    prose_share: Annotated[
        float, typer.Option(help="Share of training rows that are prose.")
    ] = 0.6,
    own: Annotated[
        Path | None,
        typer.Option(help="The small model's own answers, as `answers` writes them.", exists=True),
    ] = None,
    published: Annotated[
        bool, typer.Option(help="Start from the recipe's present update instead of from nothing.")
    ] = False,
    seed: int = 0,
) -> None:
    """Heal the pruned model by distillation, then `publish` the update."""
    from .distill import Training
    from .distill import distill as heal

    heal(
        Training(
            steps=steps, rank=rank, learning_rate=learning_rate, prose_share=prose_share, seed=seed
        ),
        work,
        prose,
        published,
        own,
    )
    publish([work])


@app.command()
def publish(
    work: Annotated[
        list[Path],
        typer.Option(
            help="Folder of a distillation. Several, each from the one before: the mean of their updates."
        ),
    ],
) -> None:
    """Put the update of the latest checkpoint into the recipe; what `build` makes changes with it."""
    from .distill import TRAINING_FILE
    from .gguf_source import file_sha256
    from .update import UPDATE_FILE, Recipe, mean_update, save_update

    recipe = Recipe.read()
    files = [folder / "update.safetensors" for folder in work]
    if len(files) == 1:
        shutil.copyfile(files[0], UPDATE_FILE)
    else:
        save_update(mean_update(recipe, files), recipe.layers_removed, UPDATE_FILE)
    training = json.loads((work[-1] / "training.json").read_text()) | {"mean_of": len(work)}
    TRAINING_FILE.write_text(json.dumps(training, indent=2) + "\n")
    Recipe(recipe.layers_removed, file_sha256(UPDATE_FILE)).write()
    typer.echo(TRAINING_FILE.read_text())


@app.command()
def card(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with hellaswag.jsonl, arc_easy.jsonl and piqa.jsonl; without it, no task table.",
            exists=True,
        ),
    ] = None,
    prose: Annotated[
        Path | None,
        typer.Option(help="Held-out prose by people, never trained on.", exists=True),
    ] = None,
    work: Work = Path("work/card"),
    measure: Annotated[
        bool,
        typer.Option(help="Measure again; otherwise write SMALL_MODEL.md from small_card.json."),
    ] = True,
) -> None:
    """Measure both models and write small_card.json and SMALL_MODEL.md."""
    from . import card as cards

    if measure:
        cards.measure(cards.Inputs(data, prose), work)
    cards.write_markdown()


if __name__ == "__main__":
    app()
