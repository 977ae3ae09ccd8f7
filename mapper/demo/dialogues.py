"""Writes the demo's dialogues and prose: the large model samples them all from topics, templates and itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import torch
from rich.progress import track
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mapper.capture.grouped import GROUPED_ATTENTION

from . import prompts
from .models import build_large, build_small
from .sampling import Sampling, sample

FOLDER = Path(__file__).parent
DIALOGUES_FILE = FOLDER / "dialogues.jsonl"
PROSE_FILE = FOLDER / "prose.jsonl"
MAX_BYTES = 14_000_000

ANSWER = Sampling(max_new_tokens=192, temperature=0.7)
# Sampled freely, the model gets easy questions wrong as often as not, though it mostly knows the answers.
EASY_ANSWER = Sampling(max_new_tokens=192, temperature=0.4)
QUESTION = Sampling(max_new_tokens=48, temperature=1.0, top_k=100)
EASY_QUESTIONS = Sampling(max_new_tokens=64, temperature=0.9, top_k=100)
PROSE = Sampling(max_new_tokens=256)
# Near to its likeliest answers, which are what it is judged by and where it runs into loops.
OWN_ANSWER = Sampling(max_new_tokens=112, temperature=0.4)

ROWS = 192
EASY_SHARE = 0.4
OWN_QUESTION_SHARE = 0.25
FACT_SHARE = 0.45
SECOND_TURN_SHARE = 0.35
PROSE_EVERY = 4
SHORT_QUESTION = 60


def generate(batches: int, work: Path, seed: int = 0) -> None:
    """Samples `batches` batches into `work`, one file each (those already there are kept), then writes both files."""
    work.mkdir(parents=True, exist_ok=True)
    missing = [index for index in range(batches) if not _batch_file(work, index).exists()]
    if missing:
        folder = build_large()
        # bf16 samples a third faster; the text only has to be the large model's in kind
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=GROUPED_ATTENTION
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for index in track(missing, description="sampling"):
            rows = _sample_batch(model, tokenizer, index, seed)
            part = _batch_file(work, index).with_suffix(".part")
            part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            part.rename(_batch_file(work, index))
    collect([_batch_file(work, index) for index in range(batches)])


def answer_as_small(questions: Path, count: int, out: Path, seed: int = 0) -> None:
    """Lets the small model answer `count` short questions of the training dialogues in the file `questions`.

    Trained on them, with the large model's distribution as the target, it learns what to say after its own words
    (on-policy distillation, Agarwal et al. 2024). They are no dialogues to learn to answer like: half are wrong.
    """
    asked = sorted({messages[0]["content"] for messages in load_dialogues("train", questions)})
    short = [question for question in asked if len(question) <= SHORT_QUESTION]
    chosen = random.Random(f"own-{seed}").sample(short, min(count, len(short)))
    tokenizer = AutoTokenizer.from_pretrained(build_large())
    model = AutoModelForCausalLM.from_pretrained(
        build_small(), dtype=torch.bfloat16, attn_implementation=GROUPED_ATTENTION
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with out.open("w") as file:
        for start in track(range(0, len(chosen), ROWS), description="answering"):
            rows = [_asked(question, "train") for question in chosen[start : start + ROWS]]
            for row in _answered(model, tokenizer, rows, generator, OWN_ANSWER):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def collect(files: list[Path], dialogues: Path = DIALOGUES_FILE, prose: Path = PROSE_FILE) -> None:
    """Filters the sampled rows, drops repeats and writes as many as the size limit takes, in order.

    A question may come back with another answer, which teaches as much as another question; a held-out one may not.
    What asks the same as a judged prompt is dropped.
    """
    asked: set[str] = set()
    answered: set[tuple[str, str]] = set()
    lines: dict[Path, list[str]] = {dialogues: [], prose: []}
    for file in files:
        for row in map(json.loads, file.read_text().splitlines()):
            texts = (
                [message["content"] for message in row["messages"]]
                if "messages" in row
                else [row["text"][:80], row["text"]]
            )
            first = _plain(texts[0])
            again = first in asked if row["split"] == "heldout" else (first, texts[1]) in answered
            if prompts.is_judged(texts[0]) or again or not all(map(is_sound, texts)):
                continue
            asked.add(first)
            answered.add((first, texts[1]))
            line = json.dumps(row, ensure_ascii=False) + "\n"
            lines[dialogues if "messages" in row else prose].append(line)
    for path, kept in lines.items():
        size, within = 0, []
        for line in kept:
            size += len(line.encode())
            if size <= MAX_BYTES:
                within.append(line)
        path.write_text("".join(within))


def load_dialogues(
    split: str, path: Path = DIALOGUES_FILE, temperature: float | None = None
) -> list[list[dict[str, str]]]:
    """The messages of each conversation of the split; with `temperature`, of those whose last answer was drawn at it."""
    rows = map(json.loads, path.read_text().splitlines())
    return [
        row["messages"]
        for row in rows
        if row["split"] == split
        and temperature in (None, row.get("temperature", ANSWER.temperature))
    ]


def load_prose(split: str, path: Path = PROSE_FILE) -> list[str]:
    return [
        row["text"]
        for row in map(json.loads, path.read_text().splitlines())
        if row["split"] == split
    ]


def is_sound(text: str) -> bool:
    """No empty text, none of the template's marks inside it, and no loop: four-word runs are nearly all different."""
    words = text.lower().split()
    runs = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    loops = len(runs) > 12 and len(set(runs)) < 0.85 * len(runs)
    return bool(words) and not loops and "<|" not in text


def _batch_file(work: Path, index: int) -> Path:
    return work / f"batch-{index:03}.jsonl"


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def _sample_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, index: int, seed: int
) -> list[dict]:
    chooser = random.Random(f"{seed}-{index}")
    generator = torch.Generator().manual_seed(seed * 100_003 + index)
    if index % PROSE_EVERY == PROSE_EVERY - 1:
        return _prose(model, tokenizer, chooser, generator)
    return _dialogues(model, tokenizer, chooser, generator)


def _prose(model, tokenizer, chooser: random.Random, generator: torch.Generator) -> list[dict]:
    chosen = [
        (chooser.choice(prompts.topics()), chooser.choice(prompts.PROSE_OPENINGS))
        for _ in range(ROWS)
    ]
    openings = [
        opening.format(topic)[:1].upper() + opening.format(topic)[1:] for topic, opening in chosen
    ]
    rows = []
    for (topic, _), opening, (text, _) in zip(
        chosen, openings, sample(model, tokenizer, openings, PROSE, generator), strict=True
    ):
        whole = _whole_sentences(text)
        if whole:
            rows.append({"text": opening + whole, "split": _split(topic)})
    return rows


def _dialogues(model, tokenizer, chooser: random.Random, generator: torch.Generator) -> list[dict]:
    easy, own = round(ROWS * EASY_SHARE), round(ROWS * OWN_QUESTION_SHARE)
    simple = prompts.simple_questions()
    questions = [chooser.choice(simple) for _ in range(easy // 2)]
    questions += _easy_questions(model, tokenizer, easy - len(questions), chooser, generator)
    easy_rows = [_asked(question, _split(question)) for question in questions]
    others = [_asked(*_template_question(chooser)) for _ in range(ROWS - easy - own)]
    for question, ended in _own_questions(model, tokenizer, own, generator):
        if ended and question.strip():
            others.append(_asked(question.strip(), _split(question)))
    rows = _answered(model, tokenizer, easy_rows, generator, EASY_ANSWER)
    rows += _answered(model, tokenizer, others, generator)
    longer = [row for row in rows if chooser.random() < SECOND_TURN_SHARE]
    shorter = [row for row in rows if not any(row is other for other in longer)]
    for row in longer:
        row["messages"].append(_user(chooser.choice(prompts.FOLLOW_UPS)))
    return shorter + _answered(model, tokenizer, longer, generator)


def _template_question(chooser: random.Random) -> tuple[str, str]:
    if chooser.random() < FACT_SHARE:
        parts, whole = chooser.choice(prompts.NUMBERS)
        question = chooser.choice(prompts.FACT_TEMPLATES).format(
            country=chooser.choice(prompts.COUNTRIES),
            thing=chooser.choice(prompts.THINGS),
            adjective=chooser.choice(prompts.ADJECTIVES),
            kind=chooser.choice(prompts.KINDS),
            parts=parts,
            whole=whole,
            most=chooser.choice(prompts.MOSTS),
            habit=chooser.choice(prompts.HABITS),
            person=chooser.choice(prompts.PEOPLE),
            a=chooser.randint(1, 50),
            b=chooser.randint(1, 50),
        )
        return question, _split(question)
    topic, other = chooser.sample(prompts.topics(), 2)
    return chooser.choice(prompts.TEMPLATES).format(topic, other=other), _split(topic)


def _easy_questions(
    model, tokenizer, count: int, chooser: random.Random, generator: torch.Generator
) -> list[str]:
    """Simple questions by the model: it goes on with a list of some, about four more lines at a time."""
    simple = prompts.simple_questions()
    lists = [
        "Easy questions for children:\n"
        + "".join(f"- {shown}\n" for shown in chooser.sample(simple, 12))
        + "-"
        for _ in range(count // 2)
    ]
    found: dict[str, str] = {}
    for text, _ in sample(model, tokenizer, lists, EASY_QUESTIONS, generator):
        # the last line is as a rule cut, and what `collect` would drop need not be answered
        for line in text.split("\n")[:-1]:
            question = line.removeprefix("-").strip()
            if re.fullmatch(r"[A-Z][^?\n]{6,90}\?", question) and not prompts.is_judged(question):
                found.setdefault(_plain(question), question)
    return chooser.sample(list(found.values()), min(count, len(found)))


def _own_questions(
    model, tokenizer, count: int, generator: torch.Generator
) -> list[tuple[str, bool]]:
    """What the model itself expects a user to write: it continues a conversation that has only its system prompt."""
    rendered = tokenizer.apply_chat_template([_user("\n")], tokenize=False)
    opening = rendered[: rendered.rindex("user\n") + len("user\n")]
    return sample(model, tokenizer, [opening] * count, QUESTION, generator)


def _answered(
    model, tokenizer, rows: list[dict], generator: torch.Generator, how: Sampling = ANSWER
) -> list[dict]:
    texts = [
        tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    complete = []
    for row, (answer, ended) in zip(
        rows, sample(model, tokenizer, texts, how, generator), strict=True
    ):
        text = answer if ended else _whole_sentences(answer)
        if text:
            row["messages"].append({"role": "assistant", "content": text})
            row["temperature"] = how.temperature
            complete.append(row)
    return complete


def _whole_sentences(text: str) -> str:
    """Text that the token limit has cut, without its last, broken sentence."""
    whole = re.match(r"(?s).*[.!?]", text)
    return whole[0] if whole else ""


def _asked(question: str, split: str) -> dict:
    return {"messages": [_user(question)], "split": split}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _split(text: str) -> str:
    return "heldout" if prompts.is_heldout(text) else "train"
