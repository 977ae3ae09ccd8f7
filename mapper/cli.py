"""The mapper's commands. Imports of torch and SGLang wait until a command runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from mapper.errors import MapperError

app = typer.Typer()

DEFAULT_STORE = Path("/dev/shm") / f"baton-{os.getuid()}"
DEFAULT_STORE_BYTES = 2 << 30

StoreOption = Annotated[
    Path, typer.Option(help="Page store directory, shared by the workers and mapper of a node.")
]
StoreBytesOption = Annotated[
    int, typer.Option(help="Limit of the page store in bytes; beyond it the oldest pages go.")
]


@app.command()
def worker(
    tier: Annotated[
        str, typer.Option(help="small or large: which demo model, and which default port.")
    ],
    model_path: Annotated[
        Path | None, typer.Option(help="A Hugging Face model folder instead of the demo model.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Served model name; the folder's name by default.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Default: 30001 small, 30002 large.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16, also of the KV.")
    ] = "float32",
    page_size: Annotated[int, typer.Option(help="Tokens a page; the same on both tiers.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Size of the KV pool in tokens.")] = 16384,
    memory_fraction: Annotated[
        float, typer.Option(help="SGLang's --mem-fraction-static; leave room for other workers.")
    ] = 0.3,
    threads: Annotated[int | None, typer.Option(help="CPU threads of this worker.")] = None,
    store: StoreOption = DEFAULT_STORE,
    store_bytes: StoreBytesOption = DEFAULT_STORE_BYTES,
    log: Annotated[Path | None, typer.Option(help="Where SGLang's own output goes.")] = None,
    sglang: Annotated[
        list[str] | None, typer.Argument(help="Further SGLang flags, after a --.")
    ] = None,
) -> None:
    """Run one stock SGLang worker with Baton's page store connected.

    Starts it, waits until it is healthy, and stops it on Ctrl-C or SIGTERM.
    """
    from rich.console import Console

    from mapper.sglang_plugin.worker import Worker, WorkerConfig

    if tier not in ("small", "large"):
        raise typer.BadParameter("must be small or large", param_hint="--tier")
    console = Console(stderr=True)
    if model_path is None:
        from mapper.demo import model_name
        from mapper.demo.models import build_large, build_small

        model_path = build_small() if tier == "small" else build_large()
        name = name or model_name(tier)
    config = WorkerConfig(
        model_path=model_path,
        name=name or model_path.name,
        port=port or {"small": 30001, "large": 30002}[tier],
        store=store,
        store_bytes=store_bytes,
        dtype=dtype,
        page_size=page_size,
        kv_tokens=kv_tokens,
        memory_fraction=memory_fraction,
        threads=threads,
        extra_flags=tuple(sglang or ()),
    )
    with _reported():
        running = Worker(config, log or store.with_name(f"{store.name}-{tier}.log"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with _reported(), console.status(f"{config.name}: starting") as status:

            def show(line: str) -> None:
                status.update(f"{config.name}: starting  [dim]{line[:100]}[/]")

            seconds = running.wait_ready(progress=show)
        console.print(
            f"[green]{config.name} is ready[/] at {config.url} after {seconds:.0f} s "
            f"(log: {running.log}). Ctrl-C stops it."
        )
        status_code = running.process.wait()
        console.print(f"[red]{config.name} ended with {status_code}[/]; see {running.log}")
        raise typer.Exit(1)
    except KeyboardInterrupt:
        pass
    finally:
        running.stop()


@app.command("mapper")
def serve_mapper(
    artifact: Annotated[
        list[Path] | None,
        typer.Option(help="Artifact folder made by `baton calibrate`; repeat for each direction."),
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT or unix:///path.")] = "127.0.0.1:8401",
    device: Annotated[str, typer.Option(help="Where maps are applied: cpu or cuda.")] = "cpu",
    store: StoreOption = DEFAULT_STORE,
    store_bytes: StoreBytesOption = DEFAULT_STORE_BYTES,
) -> None:
    """Run the mapper: converts pages between the models of this node's page store."""
    from mapper.service.app import MapperConfig, run

    with _reported():
        run(
            MapperConfig(
                store=store,
                store_bytes=store_bytes,
                artifacts=artifact or [],
                listen=listen,
                device=device,
            )
        )


@app.command()
def inspect(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.")],
) -> None:
    """Verify an artifact and show what it maps, how it was made, and how good it is."""
    from mapper.artifact import describe

    with _reported():
        print(json.dumps(describe(artifact), indent=1))


@app.command()
def calibrate(
    source: Annotated[Path, typer.Argument(help="Model folder whose cache is there.")],
    target: Annotated[Path, typer.Argument(help="Model folder whose cache is wanted.")],
    out: Annotated[Path, typer.Argument(help="Artifact folder to write.")],
    text: Annotated[
        list[Path],
        typer.Option(
            help="Text to calibrate on: .jsonl of {messages: [...]} or plain; repeatable."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="auto (chosen layer by layer), all-head (the paper's), head-local, blocks "
            "(heads chosen one by one), mlp, identity (a model onto itself)."
        ),
    ] = "auto",
    k: Annotated[
        int, typer.Option(min=1, help="Source layers, or blocks, an output reads (not for auto).")
    ] = 6,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parameters that auto may spend; else an eighth of the target's layers'."
        ),
    ] = None,
    refit: Annotated[
        str | None,
        typer.Option(help="repair or attention: a second pass that weighs rows by attention."),
    ] = None,
    ridge: Annotated[
        float, typer.Option(help="Penalty, above 0, relative to the inputs' variance.")
    ] = 1e-4,
    narrow: Annotated[
        bool,
        typer.Option(
            help="Make keys of keys and values of values, of their own token alone: the sums of auto and blocks take "
            "a sixth of the memory, with --reverse a tenth, and turns that refer far back lose more."
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of text to use at most.")] = 60_000,
    distill_seconds: Annotated[
        float, typer.Option(min=0, help="Time to train the maps on answers; kept only if it helps.")
    ] = 0,
    reverse: Annotated[
        Path | None,
        typer.Option(help="Artifact folder for the other direction, from the same pass."),
    ] = None,
    from_store: Annotated[
        Path | None,
        typer.Option(
            help="A page store of two live workers: pages that both computed of the same tokens "
            "are added, without running the models on them."
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="With --from-store: whose pages may be read; none: those without one."),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="OUT.moments of another process or machine, of other text; repeatable."),
    ] = None,
    native_tail: Annotated[
        int | None,
        typer.Option(
            min=0, help="Last tokens of a prompt that the target prefills; else measured."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Of the workers.")] = 16,
    kv_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Of the workers' KV cache; a quantised one cannot be mapped."),
    ] = "float32",
) -> None:
    """Fit a map from one model's KV cache to another's, in one pass over some text.

    Interrupted, it continues where it was when started again with the same arguments.
    """
    from mapper.calibrate import run
    from mapper.methods.attended import REFITS
    from mapper.methods.fit import METHODS

    _one_of("--method", method, METHODS)
    _one_of("--refit", refit, (None, *REFITS))
    if not ridge > 0:
        raise typer.BadParameter(f"{ridge} is not above 0", param_hint="--ridge")
    with _reported():
        folder = run(
            source, target, text, out,
            reverse=reverse, method=method, k=k, ridge=ridge, budget=budget, refit=refit,
            narrow=narrow, distill_seconds=distill_seconds, tokens=tokens, native_tail=native_tail,
            merge=merge or (), from_store=from_store, tenants=tenant or (None,),
            page_size=page_size, kv_dtype=kv_dtype,
        )  # fmt: skip
    typer.echo(f"{folder}: `baton inspect` shows it, `baton mapper --artifact` serves it")


@app.command("eval")
def evaluate(
    source: Annotated[Path, typer.Argument(help="Model folder whose cache is mapped.")],
    target: Annotated[Path, typer.Argument(help="Model folder that answers on mapped KV.")],
    out: Annotated[Path, typer.Argument(help="Folder for report.json and plots.")],
    variant: Annotated[
        list[Path],
        typer.Option(
            "--variant",
            "--artifact",
            help="Artifact folder to measure; repeat it to compare several. Controls are made "
            "from the first one.",
        ),
    ],
    dialogues: Annotated[
        Path, typer.Option(help=".jsonl of {messages, split} that no artifact was fitted on.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of JSONL task files, named as the task; none: dialogues only."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="Artifact whose KL all others are divided by; it is also measured with "
            "position 0 mapped, as published. OUT.moments beside it is used if there."
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Only this task; repeatable. An unknown name lists them."),
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option(
            help="Task of lm-evaluation-harness, if installed; repeatable; no time limit."
        ),
    ] = None,
    harness_tasks: Annotated[
        Path | None, typer.Option(help="Folder of YAML files that define further harness tasks.")
    ] = None,
    split: Annotated[str, typer.Option(help="Lines of --dialogues to use.")] = "heldout",
    conversations: Annotated[int, typer.Option(help="Dialogues to measure at most.")] = 40,
    items: Annotated[
        int, typer.Option(help="Questions a task at most; of squad and coqa twice as many.")
    ] = 100,
    tail: Annotated[
        int | None,
        typer.Option(
            help="Last prompt tokens that the target computes itself; default: as many as the "
            "first artifact was made to run with. Only such artifacts get a quality card."
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(help="Limit of the run: fewer items where all take longer. 0: no limit."),
    ] = 12,
    dtype: Annotated[
        str, typer.Option(help="What both models compute in: float32 or bfloat16.")
    ] = "float32",
) -> None:
    """Measure what mapped KV does to answers, beside floors, controls and the source alone.

    One direction a run; exchange SOURCE and TARGET, with the other artifacts, for the other.
    An estimate is printed first, then tables; OUT gets report.json and plots, and each
    artifact's manifest its quality card, by which policies decide whether to use mapped KV.

        baton eval SMALL LARGE report --variant maps/auto --variant maps/local
            --baseline maps/ridge --dialogues heldout.jsonl --data tasks
    """
    from mapper.quality.evaluate import run

    with _reported():
        run(
            source, target, variant, dialogues, out,
            data=data, baseline=baseline, tasks=tuple(task or ()), split=split,
            conversations=conversations, items=items, tail=tail, minutes=minutes, dtype=dtype,
            harness=tuple(harness or ()), harness_tasks=harness_tasks,
        )  # fmt: skip


@app.command()
def outcomes(
    data: Annotated[Path, typer.Argument(help="Folder of JSONL task files.")],
    out: Annotated[Path, typer.Argument(help="JSONL to write; an interrupted run goes on there.")],
    small: Annotated[
        Path | None, typer.Option(help="Model folder of the small tier; default: the demo's.")
    ] = None,
    large: Annotated[
        Path | None, typer.Option(help="Model folder of the large tier; default: the demo's.")
    ] = None,
    items: Annotated[int, typer.Option(help="Questions a task.")] = 200,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task; repeatable; default: all that fit.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16 is faster on many machines.")
    ] = "float32",
) -> None:
    """Let both models answer task questions: what `baton tune` fits routing policies on.

    Each line of OUT has a question, both models' answers (right or wrong) and what a cascade
    would have seen of the small one's. An interrupted run goes on where it was.
    """
    from mapper.quality.outcomes import run

    if small is None or large is None:
        from mapper.demo.models import demo_models

        models = demo_models()
        small, large = small or models["small"], large or models["large"]
    with _reported():
        count = run(small, large, data, out, items=items, only=task or None, dtype=dtype)
    typer.echo(f"{out}: {count} questions")


@app.command("plan")
def show_plan(
    pair: Annotated[str, typer.Argument(help="A preset; an unknown name lists them.")],
) -> None:
    """Sizes of a published pair's map, and of ours, before anything is downloaded."""
    from mapper.plan import run

    with _reported():
        print(json.dumps(run(pair), indent=1))


def _one_of(option: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        names = ", ".join(name for name in allowed if name)
        raise typer.BadParameter(f"{value!r} is none of {names}", param_hint=option)


class _reported:
    """Turns the mapper's own errors into one line on stderr and exit status 1."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MapperError):
            typer.echo(f"baton: {error}", err=True)
            raise typer.Exit(1) from None
