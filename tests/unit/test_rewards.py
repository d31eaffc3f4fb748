"""Rewards: what models really write, worked solutions of GSM8K, programs that do not end."""

import json
import random
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from qlora_rl import ConfigConflictError
from qlora_rl.rewards import (
    exact_match,
    format_match,
    formulas,
    length_match,
    math_match,
    numeric_match,
    program_match,
    weighted,
)
from qlora_rl.rewards.numbers import final_number

DATA = Path(__file__).parents[1] / "data" / "gsm8k" / "train-128.jsonl"
PROBLEMS = [json.loads(line) for line in DATA.read_text().splitlines()]


def number_of(problem):
    return problem["answer"].rpartition("#### ")[2].replace(",", "")


# A final number n, as models give it; {d} has thousands separators.
FORMS = [
    "{n}", "{d}", "#### {n}", "The answer is {n}.", "The answer is ${d}.", "So the final answer is: **{n}**",
    r"\boxed{{{n}}}",
    r"Therefore $x = \boxed{{{n}}}$.", r"\boxed{{\text{{{n} clips}}}}", "She needs 3 + 4 = {n} clips.",
    "Answer: {n} dollars",
    "The answer is {n} apples, 2 of them red.", "The answer is 40 + 2 = {n}.", "<answer>{n}</answer>",
    "It costs ${n}.00",
    "#### {n}\n\nI hope this helps!", r"The total is \${n}", "**Answer:** {n}", "12 / 3 = 4, so there are {n} left.",
    "= {n}\n",
    "Answer = {n}.0", r"\[ 5 \times 3 = {n} \]", r"$\frac{{{n}}}{{1}}$", "{n}/1", "Thus, the answer is\n{n}",
    "Let x=9. Then {n}!",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_final_number_is_found_in_the_forms_that_models_write(form):
    said = [form.format(n=number_of(p), d=f"{int(number_of(p)):,}") for p in PROBLEMS]
    assert numeric_match(said, answer=[p["answer"] for p in PROBLEMS]) == [1.0] * len(PROBLEMS)
    # A step of the way there, before the answer, changes nothing.
    said = [f"First 17 + 4 = 21.\n{each}" for each in said]
    assert numeric_match(said, answer=[p["answer"] for p in PROBLEMS]) == [1.0] * len(PROBLEMS)


@pytest.mark.parametrize("form", FORMS)
def test_another_number_is_rejected_in_every_form(form):
    generator = random.Random(0)
    for problem in PROBLEMS:
        right = int(number_of(problem))
        wrong = generator.choice([right + 1, right - 1, right * 10, right + 100, right * 2 + 1])
        said = form.format(n=wrong, d=f"{wrong:,}")
        assert numeric_match([said], answer=[problem["answer"]]) == [0.0], said


def test_the_worked_solutions_themselves_are_right():
    answers = [p["answer"] for p in PROBLEMS]
    assert len(answers) == 128
    assert numeric_match(answers, answer=[number_of(p) for p in PROBLEMS]) == [1.0] * 128


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None), ("no number at all", None), ("-5", -5), ("\u22125", -5), ("$-5", -5), ("-$5", -5), ("it is 48-24",
            24),
        ("between 10-20", 20), ("3.5", 3.5), (".5", 0.5), ("1.2e3", 1200), ("2E-2", Fraction(1, 50)), ("1/4", 0.25),
        ("3 1/2 hours", 3.5),
        ("-7/2", -3.5), (r"\frac{-7}{2}", -3.5), (r"-\dfrac{7}{2}", -3.5), ("50%", 50), (r"50\%", 50), ("1,234,567.5",
            1234567.5),
        (r"1{,}234", 1234), (r"1\,234", 1234), ("1\u202f234", 1234), ("1/0", None), ("1e999999", None), ("1, 2, 3", 3),
        ("12,34", 34), (r"\boxed{", None), (r"\boxed{7", 7), (r"\boxed{\frac{1}{2}} and not 3", 0.5),
            (r"\boxed{1} no, \boxed{2}", 2),
        (r"\boxed{none} 4", 4), ("#### \n5", 5), ("The answer is unknown, 7?", 7), ("my answer to 3 is short: 8", 8),
        ("The answer to 5 + 3 is 8.", 8), ("The final answer of 12 * 3 is 36.", 36), ("The answer to 8 - 1 is 7.", 7),
        ("the answer to question 2: 15", 15), ("We get an answer of 12 for 3 people.", 12),
        ("The answer of 7 is right.\nI tried 2 ways", 7), (r"\boxed{10^{6}}", 10**6), (r"3\times10^{4}", 3 * 10**4),
        ("x^2 = 2^{-1}", 0.5), ("-2^2", -4), ("9" * 999 + "^300", None), ("9e300^3000", None),
        (r"\boxed{12 \text{ cm}^2}", 12), ("The area is 12 cm^2.", 12), (r"\boxed{50\text{ m}^{2}}", 50),
        ("v2 is out", 2), ("9" * 5000, None), ("\u0664\u0662", 42), ("Answer: 1\n\nAnswer: 2", 2),
    ],
)  # fmt: skip
def test_odd_texts(text, number):
    assert final_number(text) == number


def test_long_texts_take_no_long_time():
    started = time.perf_counter()
    units = ("1 ", "- ", "$ ", r"\boxed{", "####", "answer is ", "{,}", "1,", r"\frac{", "=", "1/", "e1", "2^")
    for unit in (*units, r"\times 10", "answer of 2 "):
        final_number(unit * 5000)
    assert time.perf_counter() - started < 30


def test_a_tolerance_a_column_and_messages():
    messages = [[{"role": "assistant", "content": "It is 3.14."}], [{"role": "assistant", "content": None}]]
    close = partial(numeric_match, column="solution", tolerance=0.01)
    assert close(completions=messages, solution=[3.141, 3.141], prompts=["", ""]) == [1.0, 0.0]
    assert numeric_match(messages, answer=["3.141", "no number"]) == [0.0, None]
    parts = [[{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]]
    assert exact_match(parts, answer=[4]) == [1.0]


def test_a_dataset_without_the_column_is_told_so():
    for reward in (exact_match, numeric_match, program_match):
        with pytest.raises(ConfigConflictError, match=r"\['reply'\].*functools.partial"):
            reward(completions=["a"], reply=["b"])


def test_exact_format_and_length():
    assert exact_match([" 12\n", "12 "], answer=[12, "13"]) == [1.0, 0.0]
    thinks = partial(format_match, pattern="<think>.+</think>.+")
    assert thinks(completions=["<think>a\nb</think> c", "<think></think>c", "so <think>a</think>b"]) == [1.0, 0.0, 0.0]
    assert length_match(completion_ids=[[], [1], [1, 2, 3]], at_most=2) == [0.0, 1.0, 0.0]


def test_trl_takes_them_and_names_them():
    from trl.trainer.utils import get_callable_name

    from qlora_rl.train.metrics.rewards import guard

    assert get_callable_name(partial(numeric_match, column="a")) == "numeric_match"
    assert guard(numeric_match)(completions=["2"], answer=["2"], prompts=[""], completion_ids=[[1]]) == [1.0]


# --- programs -------------------------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"


def passes(program, tests="assert add(1, 2) == 3", **options):
    return program_match([program], tests=[tests], **{"timeout_s": 60.0, **options}) == [1.0]


def test_a_right_program_passes_and_a_wrong_one_does_not():
    said = [ADD, f"Like this:\n```python\n{ADD}```\nDone.", ADD.replace("+", "-"), "nonsense (", ""]
    assert program_match(said, tests=["assert add(1, 2) == 3"] * 5, timeout_s=60.0) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert passes(ADD + "print('x' * 10**6)")
    assert passes("import math, re, itertools, collections, heapq, functools\n" + ADD)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "print('passed')",
        "import os\nos.write(1, b'0' * 32)\nos._exit(0)",
        ADD + "open('file', 'w').write('x')", ADD + "import subprocess; "
                                                    "subprocess.run(['true'])", ADD + "import os; os.fork()",
        ADD + "import socket; socket.create_connection(('127.0.0.1', 9))",
        ADD + "import os; assert os.system('true') == 0",
        ADD + "x = 'x' * 10**10", ADD + "def f(): f()\nf()", ADD + "import torch",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ],
)  # fmt: skip
def test_what_is_no_program_or_reaches_out_gets_nothing(program):
    assert not passes(program)


def test_a_program_that_does_not_end_is_ended():
    started = time.perf_counter()
    assert not passes("while True: pass", timeout_s=1.0)
    assert not passes("import time\ntime.sleep(1000)", timeout_s=1.0)
    assert time.perf_counter() - started < 30


def test_a_program_sees_nothing_of_this_process(monkeypatch):
    monkeypatch.setenv("QLORA_RL_SECRET", "x")
    look = (
        ADD + "import os, sys\n"
        "assert not {'QLORA_RL_SECRET', 'HOME', 'PATH'} & {*os.environ} and os.listdir('.') == ['program.py']\n"
        "assert not any('site-packages' in p for p in sys.path)"
    )
    assert passes(look)


def test_without_math_verify_formulas_are_compared_as_numbers_and_a_line_says_so(monkeypatch, caplog):
    formulas._has_math_verify.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answers = [p["answer"] for p in PROBLEMS]
    assert math_match(answers, answer=answers) == [1.0] * len(PROBLEMS)
    assert math_match(["x + 1", "3"], answer=["none", "4"]) == [None, 0.0]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "qlora-rl[math]" in caplog.text
    formulas._has_math_verify.cache_clear()


@pytest.mark.parametrize(
    ("said", "wanted", "reward"),
    [
        (r"So it is $\boxed{\frac{1}{2}}$.", "0.5", 1.0),
        (r"\boxed{x^2 + 2x + 1}", r"$(x+1)^2$", 1.0),
        (r"The answer is $\sqrt{2}/2$", r"$\frac{1}{\sqrt{2}}$", 1.0),
        (r"\boxed{(1, 3]}", r"$(1,3]$", 1.0),
        (r"\boxed{\{2, 1\}}", r"$\{1,2\}$", 1.0),
        (r"\boxed{x^2 + 1}", r"$(x+1)^2$", 0.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        ("no idea", r"$\sqrt{2}$", 0.0),
    ],
)
def test_formulas_are_compared_as_mathematics(said, wanted, reward):
    pytest.importorskip("math_verify")
    formulas._has_math_verify.cache_clear()
    assert math_match([said], answer=[wanted]) == [reward]


def test_with_math_verify_gsm8k_is_as_right_as_without():
    pytest.importorskip("math_verify")
    formulas._has_math_verify.cache_clear()
    some = PROBLEMS[::8]
    answers = [p["answer"] for p in some]
    assert math_match([rf"\boxed{{{number_of(p)}}}" for p in some], answer=answers) == [1.0] * len(some)
    assert math_match([rf"\boxed{{{int(number_of(p)) + 1}}}" for p in some], answer=answers) == [0.0] * len(some)


def test_weighted_sums_what_each_part_says():
    form = partial(format_match, pattern="<think>.+</think>.+")
    both = weighted((numeric_match, 1.0), (form, 0.25))
    said = ["<think>2+2</think>4", "4", "<think>2+2</think>5", "5"]
    assert both(said, answer=["4"] * 4, prompts=said, completion_ids=[[1]] * 4) == [1.25, 1.0, 0.25, 0.0]
    assert both(["<think>a</think>b", "b"], answer=["?", "?"]) == [
        0.25,
        0.0,
    ]  # no number to compare: that part is left out
    assert weighted((numeric_match, 2.0))(["4"], answer=["?"]) == [None]
    assert weighted((both, 2.0), (exact_match, 1.0))(["4"], answer=["4"]) == [3.0]


@pytest.mark.parametrize("parts", [(), (numeric_match,), ((1.0, numeric_match),)])
def test_weighted_of_no_pairs_is_rejected(parts):
    with pytest.raises(ConfigConflictError, match=r"weighted\(\(numeric_match, 1.0\)"):
        weighted(*parts)
