"""`[tools]` and `[environment]` of a run's file: checked by name and by import, shown by `qlora-rl data`, remembered by
the run."""

import json
import logging

import pytest
from runfile import reasons
from support import make_model
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from qlora_rl import ConfigConflictError, load_base, prepare_base
from qlora_rl.cli import main
from qlora_rl.commands.data import _ids, _template_arguments
from qlora_rl.config.launch import RESOLVED, changed_files, launch, load_tokenizer, record, trl_config
from qlora_rl.config.read import read_config
from qlora_rl.config.text import to_toml
from qlora_rl.data.load import TEMPLATE_COLUMN, load_data
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.train.setup.tools import _methods, load_tools

TOOLS = '''
class Game:
    """Counts."""

    def reset(self, **row):
        return " It begins."

    def guess(self, number: int) -> str:
        """
        Guesses.

        Args:
            number: The guess.
        """
        return "no"

    def get_reward(self):
        return 1.0


class NoReset:
    def guess(self, number):
        """Guesses."""


def make_game() -> Game:
    return Game()


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def bare(a: int):
    return a


def untyped(a):
    """
    Something.

    Args:
        a: A number.
    """
    return a


def undescribed(a: int):
    """Something."""
    return a
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("models") / "calling")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def write(source, tmp_path):
    """A run's file next to tools.py and its data; tables replace the usual ones."""
    (tmp_path / "tools.py").write_text(TOOLS)
    rows = [{"prompt": f"What is {a} * 7?", "answer": str(7 * a), "environment": "game"} for a in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(**tables):
        document = {
            "method": "grpo",
            "base": {"model": str(source)},
            "data": {"train": "rows.jsonl", "format": "chat"},
            "rewards": [{"use": "numeric_match"}],
            "run": {"dir": str(tmp_path / "run")},
            "train": {
                "num_generations": 2,
                "per_device_train_batch_size": 2,
                "max_completion_length": 4,
                "use_cpu": True,
            },
        } | tables
        (tmp_path / "run.toml").write_text(to_toml({name: held for name, held in document.items() if held}))
        return tmp_path / "run.toml"

    return write


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"tools": {"use": ["tools.py:multiplz"]}}, "did you mean 'multiply'?"),
        ({"tools": {"use": ["multiply"]}}, "'multiply' is not path.py:name"),
        ({"tools": {"use": []}}, "names nothing"),
        ({"tools": {"use": ["tools.py:bare"]}}, "has no docstring"),
        ({"tools": {"use": ["tools.py:untyped"]}}, "missing a type hint"),
        ({"tools": {"use": ["tools.py:undescribed"]}}, "no description for the argument 'a'"),
        ({"tools": {"use": ["tools.py:multiply", "tools.py:multiply"]}}, "two are called multiply"),
        ({"environment": {"use": "tools.py:NoReset"}}, "has no method reset(self, **row)"),
        ({"environment": {"use": "tools.py:NoReset"}}, "NoReset.guess"),
        ({"environment": {"use": "tools.py:NoReset"}, "rewards": None}, "and there is no [[rewards]]"),
        ({"tools": {"use": ["tools.py:multiply"]}, "data": {"train": "rows.jsonl"}}, "Set [data] format = 'chat'"),
        ({"tools": {"use": ["tools.py:multiply"]}, "method": "rloo"}, "belongs to grpo, async_grpo"),
        ({"rewards": None}, "[[rewards]]: is missing"),
    ],
)
def test_check_says_what_is_wrong_with_a_tool(tables, says, write):
    found = reasons(write(**tables), asks_trl=True)
    assert any(says in each for each in found), found


def test_a_file_that_raises_is_named_with_its_error(write, tmp_path):
    file = write(tools={"use": ["broken.py:multiply"]})
    (tmp_path / "broken.py").write_text("def multiply(): ...\nraise ValueError('no key')\n")
    (found,) = reasons(file, asks_trl=True)
    assert "raised ValueError while it was imported: no key" in found


def test_a_right_file_passes_and_its_paths_are_those_next_to_it(write, tmp_path):
    file = write(
        tools={"use": ["tools.py:multiply"]}, environment={"use": {"game": "tools.py:make_game"}}, rewards=None
    )
    config = read_config(file)
    assert config.tools.use == [f"{tmp_path / 'tools.py'}:multiply"]
    loaded = load_tools(config.tools.use, config.environment.use)
    assert [tool(a=3, b=4) for tool in loaded["tools"]] == [12]
    assert type(loaded["environment_factory"]["game"]()).__name__ == "Game"


@pytest.mark.parametrize("environment", [None, "tools.py:Game", {"game": "tools.py:make_game"}])
def test_prompts_with_tools_are_tokenised_as_trl_does_and_data_shows_them(
    environment, write, source, make_trainer, capsys
):
    file = write(tools={"use": ["tools.py:multiply"]}, environment=environment and {"use": environment})
    config = read_config(file)
    args, tokenizer = trl_config(config), load_tokenizer(config)
    dataset = load_data(config.data, has_template_field=hasattr(args, TEMPLATE_COLUMN))[0]
    base = prepare_base(source)
    with FakeEngine(load_base(base), max_model_length=4096) as engine:
        trainer = make_trainer(
            model=base,
            rollout=engine,
            train_dataset=dataset,
            args=args,
            **load_tools(config.tools.use, config.environment.use),
        )
        trainer._batch_environments = ["game" if isinstance(environment, dict) else None] * len(dataset)
        theirs = trainer._tokenize_prompts(list(dataset["prompt"]))[0]
    given = _template_arguments(config, tokenizer)
    assert [_ids(tokenizer, "prompt", row["prompt"], given(row)) for row in dataset] == theirs
    assert main(["data", str(file), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert '"name": "multiply", "description": "Multiplies two numbers."' in shown
    assert ('"name": "guess"' in shown) == ("may add to a prompt" in shown) == (environment is not None)


def test_a_template_without_tools_is_rejected_before_the_base_is_made(write, source, tmp_path):
    plain = AutoTokenizer.from_pretrained(source)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "plain").mkdir()
    for file in source.iterdir():
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    plain.save_pretrained(tmp_path / "plain")
    config = read_config(write(tools={"use": ["tools.py:multiply"]}, base={"model": str(tmp_path / "plain")}))
    with pytest.raises(ConfigConflictError, match="tool calls"):
        launch(config)


def test_several_environments_need_a_column_that_chooses(write, tmp_path):
    file = write(environment={"use": {"game": "tools.py:Game"}})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"environment"', '"other"'))
    with pytest.raises(ConfigConflictError, match="column environment"):
        launch(read_config(file))


def test_the_digest_of_each_file_is_kept_and_a_changed_one_is_named(write, tmp_path, caplog):
    config = read_config(write(tools={"use": ["tools.py:multiply"]}, environment={"use": "tools.py:Game"}))
    out = tmp_path / "run"
    out.mkdir()
    assert changed_files(config, out) == []
    (out / RESOLVED).write_text(record(config))
    assert (out / RESOLVED).read_text().count("# sha256 of ") == 2
    assert changed_files(config, out) == []
    (tmp_path / "tools.py").write_text(TOOLS + "\n# changed\n")
    caplog.set_level(logging.WARNING)
    assert changed_files(config, out) == [f"{tmp_path / 'tools.py'}:{name}" for name in ("multiply", "Game")]


def test_a_conversation_that_ends_with_a_tool_has_said_nothing():
    from qlora_rl.rewards import numeric_match

    ends = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "name": "multiply", "content": "12"},
    ]
    assert numeric_match([ends, [*ends, {"role": "assistant", "content": "It is 12."}]], answer=["12", "12"]) == [
        0.0,
        1.0,
    ]


def test_a_static_method_of_an_environment_keeps_its_first_argument():
    from transformers.utils import get_json_schema

    class Game:
        @staticmethod
        def double(x: int) -> int:
            """Double.

            Args:
                x: a number.
            """
            return 2 * x

        def guess(self, x: int) -> int:
            """Guess.

            Args:
                x: a number.
            """
            return x

    schemas = {name: get_json_schema(method)["function"]["parameters"] for name, method in _methods(Game)}
    assert {name: found["required"] for name, found in schemas.items()} == {"double": ["x"], "guess": ["x"]}
