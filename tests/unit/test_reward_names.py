"""`load_reward`: built-in names, files, packages, arguments; what is wrong is said."""

import pickle

import pytest

from qlora_rl import ConfigConflictError, RewardFunctionError
from qlora_rl.rewards import exact_match, load_reward, numeric_match

SOURCE = """
from dataclasses import dataclass
from beside import POINTS

@dataclass
class Rule:
    points: int = POINTS
    def __call__(self, completions, **columns):
        return [self.points] * len(completions)

rule = Rule()
WORD = "yes"

def has_word(completions, *, word=WORD, **columns):
    return [float(word in each) for each in completions]

def strict(completions, prompts):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("POINTS = 3\n")
    path = tmp_path / "rewards.py"  # a name that a package could have
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("name", "function"), [("exact", exact_match), ("numeric_match", numeric_match)])
def test_a_built_in_reward_has_a_short_and_a_long_name(name, function):
    assert load_reward(name) is function


def test_a_function_of_a_file_is_found_and_imports_what_lies_beside_it(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    reward = load_reward("rewards.py:has_word")
    assert reward(completions=["yes", "no"], answer=["a", "b"]) == [1.0, 0.0]
    assert load_reward("rewards.py:rule")(["a"]) == [3]
    assert pickle.loads(pickle.dumps(reward))(["yes"]) == [1.0]


def test_a_path_starts_from_the_folder_that_is_named(file):
    assert load_reward("rewards.py:has_word", folder=file.parent)(["yes"]) == [1.0]
    assert load_reward(f"{file}:has_word", folder="/nowhere")(["yes"]) == [1.0]


def test_arguments_are_fixed_and_the_name_stays(file):
    reward = load_reward(f"{file}:has_word", {"word": "no"})
    assert reward(["yes", "no"]) == [0.0, 1.0]
    assert reward.__name__ == "has_word"
    assert load_reward("format", {"pattern": "a+"})(["aa", "b"]) == [1.0, 0.0]


def test_what_lies_beside_a_file_is_not_what_lies_beside_another(file, tmp_path):
    load_reward(f"{file}:rule")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "beside.py").write_text("POINTS = 5\n")
    (tmp_path / "else" / "rewards.py").write_text(SOURCE)
    assert load_reward(f"{tmp_path}/else/rewards.py:rule")(["a"]) == [5]
    assert load_reward(f"{file}:rule")(["a"]) == [3]


def test_a_class_is_made_with_the_arguments(file):
    assert load_reward(f"{file}:Rule", {"points": 7})(["a"]) == [7]
    with pytest.raises(RewardFunctionError, match=r"Rule\(\*\*{'pints': 7}\) raised TypeError"):
        load_reward(f"{file}:Rule", {"pints": 7})


def test_a_function_of_an_installed_package_is_found():
    assert load_reward("qlora_rl.rewards.match:exact_match") is exact_match


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("nummeric", {}, "does not exist. Use one of exact_match, numeric_match, math_match, format_match"),
        ("FILE", {}, "Did you mean"),
        ("FILE:absent", {}, "Its functions: has_word, strict"),
        ("FILE:WORD", {}, "WORD is a str, not a function"),
        ("FILE:", {}, "is not path.py:function"),
        ("/nowhere/a.py:f", {}, "there is no file /nowhere/a.py"),
        ("no_such_package.at_all:f", {}, "there is no module 'no_such_package.at_all'"),
        ("format", {}, "'format' needs pattern"),
        ("exact", {"colum": "solution"}, "'exact' takes no 'colum'. It takes column"),
        ("FILE:strict", {"word": "a"}, "takes no 'word'"),
    ],
)
def test_what_cannot_be_loaded_is_said(file, name, arguments, says):
    with pytest.raises(ConfigConflictError) as caught:
        load_reward(name.replace("FILE", str(file)), arguments)
    assert says in str(caught.value)


def test_a_file_that_raises_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RewardFunctionError, match=r"broken\.py raised ZeroDivisionError while it was imported"):
        load_reward(f"{tmp_path}/broken.py:f")
