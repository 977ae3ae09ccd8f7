"""Heals the pruned model: trains its low-rank update to give the full model's next-token distribution."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mapper.methods.forward_kl import Candidates, forward_kl
from mapper.methods.parallel import item_threads, set_mean_gradient

from . import texts
from .dialogues import ANSWER, EASY_ANSWER, OWN_ANSWER
from .models import build_large
from .student import Student, stream_error
from .update import FOLDER, Recipe, load_update, save_update

TRAINING_FILE = FOLDER / "small_training.json"
# At which temperature the answers of each source were drawn, always among as many tokens.
TEMPERATURES = {
    "dialogues": ANSWER.temperature,
    "easy": EASY_ANSWER.temperature,
    "own": OWN_ANSWER.temperature,
}


@dataclass(frozen=True)
class Training:
    """Everything that, with the texts, fixes a run."""

    steps: int = 1000
    rows: int = 2
    length: int = 512
    prose_share: float = 0.6
    # of the rows that are no prose: easy conversations, and answers of the small model itself, where there are any
    easy_share: float = 0.3
    own_share: float = 0.2
    rank: int = 24
    learning_rate: float = 2e-3
    warmup: int = 30
    final_rate: float = 0.1
    clip: float = 1.0
    # the saved update is a running average of the trained one: as good as a lower rate, and good at any step
    average: float = 0.98
    # what the error of the streams behind each gap weighs beside the KL
    stream_weight: float = 0.5
    frequent_tokens: int = 8192
    sampled_tokens: int = 2048
    seed: int = 0

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to `final_rate` of the learning rate."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * cosine)


class Trainer:
    """The student, its optimiser's moments and the running average: what a checkpoint has to hold."""

    def __init__(self, student: Student, training: Training) -> None:
        self.training = training
        self.parameters = student.parameters()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=training.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            foreach=True,
        )
        self.average = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.step = 0
        self.seconds = 0.0

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate(self.step)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        # an average over less than its horizon would remember the untrained start
        share = 1 - min(self.training.average, self.step / (self.step + 10))
        for name, value in self.parameters.items():
            self.average[name].lerp_(value.detach(), share)

    def summary(self, sources: dict[str, tuple[torch.Tensor, float]], earlier: list[dict]) -> dict:
        """The figures of the run so far; `earlier` are those of its stages with other settings or texts."""
        tokens = self.step * self.training.rows * self.training.length
        return {
            "settings": asdict(self.training),
            "steps": self.step,
            "tokens": tokens,
            "seconds": round(self.seconds),
            "tokens_a_second": round(tokens / self.seconds, 1),
            "sources": {
                name: {"tokens": rows.numel(), "share": round(share, 3)}
                for name, (rows, share) in sources.items()
            },
            "earlier_stages": earlier,
        }

    def start_from(self, update: dict[str, torch.Tensor]) -> None:
        """Takes an earlier update as its first step; the optimiser starts afresh.

        An update of lower rank fills the first rows of `down` and columns of `up`; the further columns of `up` are
        zero, as they were at the start of that one.
        """
        for name, value in self.parameters.items():
            earlier = update[name]
            value.data[tuple(map(slice, earlier.shape))] = earlier
            self.average[name].copy_(value.detach())

    def save(self, path: Path) -> None:
        tensors = {f"now/{name}": value.detach() for name, value in self.parameters.items()}
        tensors |= {f"average/{name}": value for name, value in self.average.items()}
        for name, value in self.parameters.items():
            state = self.optimizer.state[value]
            tensors |= {f"first/{name}": state["exp_avg"], f"second/{name}": state["exp_avg_sq"]}
        part = path.with_suffix(".part")
        save_file(tensors, part, {"step": str(self.step), "seconds": str(self.seconds)})
        part.rename(path)

    def load(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self.step = int(file.metadata()["step"])
            self.seconds = float(file.metadata()["seconds"])
            for name, value in self.parameters.items():
                value.data.copy_(file.get_tensor(f"now/{name}"))
                self.average[name].copy_(file.get_tensor(f"average/{name}"))
                self.optimizer.state[value] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": file.get_tensor(f"first/{name}"),
                    "exp_avg_sq": file.get_tensor(f"second/{name}"),
                }


def distill(
    training: Training,
    work: Path,
    prose: Path | None,
    published: bool = False,
    own: Path | None = None,
    save_every: int = 50,
) -> Path:
    """Trains, or goes on from the checkpoint in `work`; leaves `update.safetensors` there, fresh at each checkpoint.

    `prose` is a file of further prose, `own` one of the small model's own answers (`answer_as_small`). With `published`,
    and no checkpoint yet, the recipe's present update is where training starts.
    """
    work.mkdir(parents=True, exist_ok=True)
    folder = build_large()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # bf16 is 1.7 times as fast as fp32 here; the trained tensors and their optimiser stay fp32
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    recipe = Recipe.read()
    student = Student(teacher, recipe.kept(len(teacher.model.layers)), training.rank, training.seed)
    trainer = Trainer(student, training)
    checkpoint = work / "checkpoint.safetensors"
    summary_file = work / "training.json"
    earlier: list[dict] = []
    if checkpoint.exists():
        trainer.load(checkpoint)
        before = json.loads(summary_file.read_text())
        earlier = [*before.pop("earlier_stages"), before]
    elif published:
        trainer.start_from(load_update(recipe))
        before = json.loads(TRAINING_FILE.read_text())
        earlier = [*before.pop("earlier_stages"), before]
    sources = training_sources(tokenizer, training, prose, own)
    counts = torch.bincount(
        torch.cat([rows.flatten() for rows, _ in sources.values()]), minlength=len(tokenizer)
    )
    candidates = Candidates(
        counts, training.frequent_tokens, training.sampled_tokens, training.seed + trainer.step
    )
    batches = iter(texts.Mixture(sources, training.rows, training.seed))
    for _ in range(trainer.step):
        next(batches)
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as bar, item_threads(training.rows) as threads:
        task = bar.add_task("healing", total=training.steps, completed=trainer.step, loss="")
        smooth = None
        while trainer.step < training.steps:
            started = time.monotonic()
            ids, names = next(batches)
            drawn_at = temperatures(tokenizer, ids, names)
            loss = train_step(student, candidates, ids, drawn_at, threads, training.stream_weight)
            trainer.update()
            trainer.seconds += time.monotonic() - started
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            bar.update(task, advance=1, loss=f"KL {smooth:.3f}")
            if trainer.step % save_every == 0 or trainer.step == training.steps:
                trainer.save(checkpoint)
                save_update(trainer.average, recipe.layers_removed, work / "update.safetensors")
                summary_file.write_text(
                    json.dumps(trainer.summary(sources, earlier), indent=2) + "\n"
                )
                bar.console.print(
                    f"step {trainer.step}: KL {smooth:.4f}, {trainer.seconds:.0f} s of training"
                )
    return work / "update.safetensors"


def training_sources(
    tokenizer, training: Training, prose: Path | None, own: Path | None
) -> dict[str, tuple[torch.Tensor, float]]:
    """Rows of dialogues, easy ones apart, of own answers and of prose, with their shares.

    Prose is from a file, where given, and from the large model.
    """
    length = training.length
    usual, easy = (
        texts.dialogue_rows(tokenizer, "train", length, TEMPERATURES[name])
        for name in ("dialogues", "easy")
    )
    talk = 1 - training.prose_share
    sources = {}
    if len(easy):
        sources["easy"] = (easy, talk * training.easy_share)
    if own:
        rows = texts.dialogue_rows(tokenizer, "train", length, path=own)
        sources["own"] = (rows, talk * training.own_share)
    sources["dialogues"] = (usual, talk - sum(share for _, share in sources.values()))
    sampled = texts.prose_rows(tokenizer, "train", length)
    if prose is None:
        return sources | {"prose": (sampled, training.prose_share)}
    written = texts.file_rows(tokenizer, prose, length)
    share = len(sampled) / (len(sampled) + len(written))
    return sources | {
        "prose": (sampled, training.prose_share * share),
        "file": (written, training.prose_share * (1 - share)),
    }


def temperatures(tokenizer, ids: torch.Tensor, names: list[str]) -> torch.Tensor:
    """At which temperature each next token was drawn, [rows, length]; 1 where it is no answer's."""
    of_row = torch.tensor([TEMPERATURES.get(name, 1.0) for name in names])[:, None]
    return torch.where(texts.answer_positions(tokenizer, ids), of_row, 1.0)


def train_step(
    student: Student,
    candidates: Candidates,
    ids: torch.Tensor,
    drawn_at: torch.Tensor,
    threads: ThreadPoolExecutor,
    stream_weight: float,
) -> float:
    """The mean KL of the rows [rows, length]; leaves the loss's gradient in the student's parameters.

    Where `drawn_at` is below 1, the target is the distribution that the teacher draws such answers from, at that
    temperature and among its top k (sequence-level distillation, Kim and Rush 2016, with the soft targets kept), else
    the teacher's own.
    Beside the KL of next tokens, the loss is the error of the student's stream where it rejoins the teacher's layers
    after a gap (as intermediate losses of depth pruning, Muralidharan et al. 2024): it costs nothing, the KL falls as
    fast with it, and a cache that stays near the teacher's is one that can be mapped.

    Each row runs on a thread of its own.
    """
    chosen, log_weight = candidates.draw(ids)
    head = student.teacher.lm_head.weight[chosen]
    parameters = list(student.parameters().values())
    among = torch.where(drawn_at < 1, ANSWER.top_k, 0)

    def one_row(row: int) -> tuple[float, tuple[torch.Tensor, ...]]:
        lesson = student.teach(ids[row : row + 1])
        wanted = (lesson.last.float() / drawn_at[row, :, None]).to(lesson.last.dtype)
        last, streams = student.follow(lesson.parting)
        divergence = forward_kl(last, wanted, head, log_weight, among[row])
        loss = divergence + stream_weight * stream_error(streams, lesson.streams)
        return divergence.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*threads.map(one_row, range(len(ids))), strict=True)
    set_mean_gradient(parameters, gradients)
    return sum(losses) / len(ids)
