"""Task files: what becomes a question, how answers are judged, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapper.errors import BadTask
from mapper.quality.tasks import FORMATS, read_tasks
from mapper.quality.tasks.answers import (
    exact,
    last_number,
    normalise,
    overlap,
    repeats,
    same_number,
    span_kind,
)

ROWS = {
    "arc_easy": {"id": "a1", "question": "What?", "choices": ["one", "two", "three"], "label": 2},
    "arc_challenge": {"question": "What?", "choices": ["one", "two"], "label": 0},
    "openbookqa": {"question": "What?", "choices": ["one", "two"], "label": 0},
    "mmlu": {"subject": "s", "question": "What?", "choices": ["one", "two"], "label": 0},
    "hellaswag": {"activity_label": "Run", "ctx": "He", "endings": ["runs.", "sits."], "label": 0},
    "piqa": {"goal": "Cut", "sol1": "a knife", "sol2": "a spoon", "label": 0},
    "boolq": {"passage": "It is so.", "question": "is it so", "label": 1},
    "winogrande": {"sentence": "Ann saw _ run.", "option1": "Bob", "option2": "Eve", "label": 1},
    "squad": {"title": "t", "context": "In 1066.", "question": "When?", "answers": ["1066"]},
    "coqa": {
        "source": "s",
        "story": "A story.",
        "turns": [
            {"question": f"q{n}", "answer": f"a{n}", "answers": [f"a{n}"]} for n in range(12)
        ],
    },
    "gsm8k": {"question": "How many?", "answer": "1+1=<<1+1=2>>2\n#### 2", "final": "2"},
    "lambada": {"text": "he saw the dog", "target": "dog"},
    "humaneval": {"prompt": "def f():\n", "canonical_solution": "    return 1\n"},
    "perplexity": {"text": "word " * 1500},
}


def write(folder, **tasks) -> None:
    for name, rows in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions(folder, name: str, row: dict) -> list:
    write(folder, **{name: [row]})
    (task,) = read_tasks(folder, items=50, only=[name])
    return task.questions


def test_there_is_an_example_row_of_every_format() -> None:
    assert ROWS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_questions_its_judge_can_use(tmp_path, name: str) -> None:
    made = questions(tmp_path, name, ROWS[name])
    judge = FORMATS[name].judge
    for question in made:
        assert question.prompt
        if judge == "choice":
            assert question.options and question.solution.startswith(
                question.options[question.label]
            )
        elif judge in ("word", "likelihood"):
            assert question.reference == question.solution
        else:
            assert question.answers and question.solution
    assert made


def test_what_questions_look_like(tmp_path) -> None:
    (blank,) = questions(tmp_path, "winogrande", ROWS["winogrande"])
    assert (blank.prompt, blank.options, blank.suffix) == ("Ann saw", (" Bob", " Eve"), " run.")
    assert blank.solution == " Eve run."
    (word,) = questions(tmp_path, "lambada", ROWS["lambada"])
    assert (word.prompt, word.reference) == ("he saw the", " dog")
    talk = questions(tmp_path, "coqa", ROWS["coqa"])
    assert len(talk) == 3
    assert len({one.group for one in talk}) == 1
    assert talk[0].prompt.endswith("Q: q4\nA: a4\n\nQ: q5\nA:") and talk[0].answers[0] == " a5"
    assert talk[1].prompt.startswith(talk[0].prompt)
    (total,) = questions(tmp_path, "gsm8k", ROWS["gsm8k"])
    assert "<<" not in total.reference and total.reference.endswith("#### 2")
    text = ROWS["perplexity"]["text"]
    windows = questions(tmp_path, "perplexity", ROWS["perplexity"])
    assert len(windows) == 2
    assert "".join(one.prompt + one.reference for one in windows) == text[:6600]


def test_prompts_are_long_and_show_no_question_as_its_own_example(tmp_path) -> None:
    rows = [
        {"question": f"what is number {i} " + "x " * 20, "choices": ["one", "two"], "label": i % 2}
        for i in range(90)
    ]
    write(tmp_path, arc_easy=rows)
    (task,) = read_tasks(tmp_path, items=20)
    assert len(task.questions) == 20
    assert [one.group for one in task.questions] == list(range(20))
    # Examples are kept whatever is asked for, and are the same ones.
    (greedy,) = read_tasks(tmp_path, items=1000)
    assert len(greedy.questions) == 45 and greedy.examples == task.examples
    shared = task.shared_prompt(lambda text: len(text.split()), 512)
    assert len(shared.split()) >= 512
    assert not any(question.prompt in shared for question in task.questions)
    assert f"{task.examples[0].prompt}{task.examples[0].solution}\n\n" in shared


def test_only_tasks_that_are_there(tmp_path) -> None:
    write(tmp_path, squad=[ROWS["squad"]] * 3, arc_easy=[ROWS["arc_easy"]] * 3)
    (tmp_path / "other.jsonl").write_text("not a task\n")
    assert [task.name for task in read_tasks(tmp_path, items=1)] == ["arc_easy", "squad"]


def test_prose_is_also_read_from_plain_text(tmp_path) -> None:
    text = "\n\n\n".join(["word " * 700, "too short", "other " * 600])
    (tmp_path / "text_heldout_books.txt").write_text(text)
    (task,) = read_tasks(tmp_path, items=10)
    assert task.name == "perplexity" and len(task.questions) == 2


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        (
            "arc_easy",
            '{"question": "What?", "choices": ["one", "two"], "label": 2}',
            "label 2 of 2",
        ),
        ("arc_easy", '{"question": "What?", "choices": ["one"], "label": 0}', "choices"),
        ("arc_easy", '{"question": "What?", "choices": ["a", "b"], "label": "0"}', "label"),
        ("piqa", '{"goal": "Cut", "sol1": "a", "sol2": "b", "lable": 0}', "label"),
        ("piqa", '{"goal": "Cut", "sol1": "a", "sol2": "b", "label": 0, "sol3": "c"}', "sol3"),
        ("squad", '{"context": "c", "question": "q", "answers": []}', "answers"),
        (
            "coqa",
            '{"story": "s", "turns": [{"question": "q", "answers": ["a"]}]}',
            "turns.0.answer",
        ),
        ("gsm8k", '{"question": "q", "answer": "a", "final": "two"}', "final"),
        ("lambada", '{"text": "he saw the dog", "target": "cat"}', "end in the target"),
        ("winogrande", '{"sentence": "x", "option1": "a", "option2": "b", "label": 0}', "sentence"),
        ("perplexity", '{"text": "cut off', "no JSON"),
        ("perplexity", '["text"]', "object"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(tmp_path, name, line, reason) -> None:
    file = tmp_path / f"{name}.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n\n" + line + "\n")
    with pytest.raises(BadTask) as refused:
        list(read_tasks(tmp_path, items=5))
    assert f"{file}:3: " in str(refused.value) and reason in str(refused.value)


def test_unknown_and_missing_tasks_are_refused(tmp_path) -> None:
    with pytest.raises(BadTask, match="none of the task files"):
        list(read_tasks(tmp_path, items=5))
    with pytest.raises(BadTask, match=r"no task.*there are arc_easy"):
        list(read_tasks(tmp_path, items=5, only=["arc"]))
    write(tmp_path, squad=[ROWS["squad"]])
    with pytest.raises(BadTask, match=r"no arc_easy\.jsonl"):
        list(read_tasks(tmp_path, items=5, only=["arc_easy"]))
    (tmp_path / "squad.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(BadTask, match="squad"):
        list(read_tasks(tmp_path, items=5))
    (tmp_path / "squad.jsonl").write_text("\n")
    with pytest.raises(BadTask, match="no questions"):
        list(read_tasks(tmp_path, items=5))


@pytest.mark.parametrize(
    ("spoken", "answer", "same"),
    [
        (" The Paris.", "paris", True),
        ("3.5 km", "3.5 km", True),
        ("35 km", "3.5 km", False),
        ("1,066 men.", "1066 men", True),
        ("U.S. Army", "us army", False),
        ("", "paris", False),
    ],
)
def test_spans_are_compared_as_squad_does(spoken: str, answer: str, same: bool) -> None:
    assert exact(spoken, ["something else", answer]) == float(same)


@given(st.text())
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_overlap_of_words() -> None:
    assert overlap("the big red dog", ["cat", "a big dog"]) == pytest.approx(2 * 2 / 5)
    assert overlap("", ["dog"]) == 0.0 and overlap("dog", ["dog"]) == 1.0


@pytest.mark.parametrize(
    ("spoken", "number"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("It costs $1,234.50 in all", "1234.5"),
        ("#### -3", "-3"),
        ("no number", None),
        ("#### \n", None),
        ("the total is 12.", "12"),
    ],
)
def test_numbers_out_of_worked_solutions(spoken: str, number: str | None) -> None:
    assert last_number(spoken) == number


@given(st.integers(-(10**9), 10**9))
def test_a_number_is_the_same_however_it_is_written(number: int) -> None:
    assert same_number(f"that makes {number:,}", str(number)) == 1.0
    assert same_number(f"{number}.00", str(number)) == 1.0
    assert same_number(f"{number + 1}", str(number)) == 0.0


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("23 years", "number"),
        ("Henry Luce", "name"),
        ("University of Leeds", "name"),
        ("a red dog", "span"),
        ("teachers facilitate learning", "span"),
    ],
)
def test_kinds_of_spans(answer: str, kind: str) -> None:
    assert span_kind(answer) == kind


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=20)
)
def test_repetition_loops_are_found(piece: list[int], before: list[int]) -> None:
    assert repeats(before + piece * 12)


def test_no_loop_where_nothing_repeats() -> None:
    assert not repeats(list(range(40)))
    assert not repeats([1, 2, 3] * 3)
    assert not repeats([5, 5, 5])
