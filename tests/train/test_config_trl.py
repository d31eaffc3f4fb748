"""`[train]` of a run's TOML file: every field of TRL's config, each with a wrong value."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from runfile import GOOD, reasons, written

import qlora_rl
from qlora_rl.adapter.load import make_lora
from qlora_rl.config.launch import find_trainer, trainer_arguments, trl_config
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import ALIASES, ELSEWHERE, IDLE, Adapter
from qlora_rl.config.trl_fields import CHOICES, LIMITS, OBJECTS, check_train, fits, train_fields
from qlora_rl.errors import MissingDependencyError
from qlora_rl.fidelity import CORRECTION
from qlora_rl.methods import METHODS
from qlora_rl.train.setup.settings import config_class

# One of them fits nothing that TRL has.
CANDIDATES = ("perhaps", 3.5, True, {"x": [1]}, [[[]]])


def some(directory: Path, **changes) -> Path:
    return written(directory, {**GOOD, **changes})


def said(file: Path) -> tuple[str, ...]:
    return reasons(file, asks_trl=True)


@pytest.mark.parametrize("method", METHODS.values())
def test_a_trainer_names_the_row_of_its_method(method):
    assert getattr(qlora_rl, method.trainer)._method is method


@pytest.mark.parametrize("method", METHODS)
def test_every_field_of_trl_rejects_a_wrong_type_and_takes_its_default(method):
    config = config_class(method)
    known = train_fields(config)
    assert len(known) > 100
    for each in fields(config):
        if each.name not in known:
            continue
        name, field = each.name, known[each.name]
        wrong = [value for value in CANDIDATES if not fits(value, field)]
        assert wrong, name
        for value in wrong:
            (found,) = check_train(method, {name: value}, config)
            assert found.place == f"[train] {name}"
            assert " is not " in found.text
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        assert fits(getattr(usual, "value", usual), field) or usual is None, (name, usual)


@pytest.mark.parametrize("method", METHODS)
def test_no_field_of_trl_is_forgotten(method):
    """What cannot be said in [train] is said elsewhere, does nothing, or is an object that TOML cannot hold."""
    config = config_class(method)
    left = {each.name for each in fields(config) if each.init} - set(train_fields(config)) - set(ELSEWHERE) - set(IDLE)
    assert left <= set(OBJECTS)


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_out_of_range_is_found(name):
    bounds = LIMITS[name]
    methods = [method for method in METHODS if name in train_fields(config_class(method))]
    assert methods, "no config of TRL has it"
    outside = [bounds[bound] + step for bound, step in (("gt", 0), ("lt", 0), ("ge", -1), ("le", 1)) if bound in bounds]
    for value in outside:
        value = int(value) if float(value).is_integer() else value
        (found,) = check_train(methods[0], {name: value}, config_class(methods[0]))
        assert re.fullmatch(rf"{value} is not a (whole )?number (of at least|above) .*", found.text)


@pytest.mark.parametrize(("config", "name"), CHOICES)
def test_the_choices_are_those_of_trl(config, name):
    """Every text in TRL's source that the field is compared with is a choice, and every choice is there."""
    import trl.trainer.grpo_trainer as source

    text = inspect.getsource(source)
    compared = set()
    for one, many in re.findall(rf"{name} (?:==|!=|in|not in) (?:\"(\w+)\"|\[([^\]]*)\])", text):
        compared |= {one} if one else set(re.findall(r'"(\w+)"', many))
    assert compared <= set(CHOICES[config, name])
    for choice in CHOICES[config, name]:
        assert choice in compared or f"'{choice}'" in text, choice
    (found,) = check_train("grpo", {name: "nonsense"}, config_class("grpo"))
    assert "is not one of" in found.text


def test_what_is_unknown_is_led_to_its_place(tmp_path):
    train = {
        "learning_rat": 1.0,
        "lr": 1.0,
        "seed": 1,
        "do_train": True,
        "r": 8,
        "parallelism_config": {},
        "vllm_server_port": 1,
        "nonsense": 0,
    }
    # Together with what our own tables hold.
    assert said(some(tmp_path, train=train, sync={"canary": 1})) == (
        "[sync] canary: unknown; did you mean 'canary_every'?",
        "[train] learning_rat: unknown to TRL's GRPOConfig (method = 'grpo'); did you mean learning_rate?",
        "[train] lr: unknown; did you mean [train] learning_rate?",
        "[train] seed: its place is [run] seed",
        "[train] do_train: only example scripts of transformers read it. Leave it out",
        "[train] r: unknown; did you mean [adapter] r?",
        "[train] parallelism_config: cannot be written in TOML; use the Python API",
        "[train] vllm_server_port: its place is [rollout] where",
        "[train] nonsense: unknown to TRL's GRPOConfig (method = 'grpo'); see TRL's GRPOConfig for what there is",
    )


def test_trls_own_objections_and_ours_come_before_anything_is_loaded(tmp_path):
    sizes = {"num_generations": 3, "per_device_train_batch_size": 8}
    (found,) = said(some(tmp_path, train=sizes))
    assert found.startswith(
        "[train]: TRL rejects it: generation_batch_size (8) must be divisible by num_generations (3)"
    )
    (found,) = said(some(tmp_path, train={"vllm_importance_sampling_mode": "token"}))
    assert found.startswith("[train]: vllm_importance_sampling_mode='token': use one of token_truncate")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_service_that_is_not_installed_is_said_before_anything_is_loaded(method, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    found = said(some(tmp_path, method=method, train={"report_to": ["wandb", "wandbb"]}))
    assert (
        "[train]: report_to: WandbCallback requires wandb to be installed. Run `pip install wandb`, or leave it out"
        in found
    )
    assert any(each.startswith("[train]: report_to: wandbb is not supported, only ") for each in found)


@pytest.mark.parametrize("method", [[], {}, 3, "gpro"])
def test_a_method_that_is_none_does_not_hide_the_rest(method, tmp_path):
    found = said(some(tmp_path, method=method, train={"lr": 1}, sync={"canary": 1}))
    assert any(reason.startswith("method: ") for reason in found) or method == {}
    assert "[sync] canary: unknown; did you mean 'canary_every'?" in found


def test_a_missing_vllm_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    def missing():
        raise MissingDependencyError("looking for vLLM: not installed.")

    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", missing)
    assert said(some(tmp_path)) == ("[rollout] where: looking for vLLM: not installed.",)
    assert read_config(some(tmp_path), ['rollout.where="http://a"']).rollout.where == "http://a"


def test_none_as_text_is_no_value_where_no_text_fits(tmp_path):
    config = read_config(some(tmp_path, train={"vllm_max_model_length": "none", "report_to": "none"}))
    args = trl_config(config)
    assert (args.vllm_max_model_length, args.report_to) == (None, [])


def test_a_file_has_trls_correction_where_it_names_none(tmp_path):
    names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")

    def correction(file):
        args = trl_config(read_config(file))
        return tuple(getattr(args, name) for name in names)

    assert correction(some(tmp_path)) == ("sequence_mask", 3.0)  # docs/fidelity.md
    ours = {name: CORRECTION[name] for name in names}
    assert correction(some(tmp_path, train=ours)) == ("token_truncate", 2.0)


def test_trl_gets_what_has_its_place_elsewhere(tmp_path):
    document = {
        "run": {"dir": str(tmp_path / "out"), "seed": 7},
        "base": {"model": "a/b", "attn_implementation": "eager", "trust_remote_code": True},
        "rewards": [{"use": "exact_match"}, {"use": "numeric_match", "weight": 0.5}],
        "train": {"learning_rate": 3, "loss_type": "grpo", "scale_rewards": False},
    }
    args = trl_config(read_config(some(tmp_path, **document)))
    assert (args.output_dir, args.seed, args.trust_remote_code) == (str(tmp_path / "out"), 7, True)
    assert (args.model_init_kwargs, args.reward_weights) == ({"attn_implementation": "eager"}, [1.0, 0.5])
    assert (args.learning_rate, args.loss_type, args.scale_rewards) == (3, "grpo", "none")


@pytest.mark.parametrize("method", METHODS)
def test_every_argument_of_our_trainers_has_its_place_in_the_file(method, tmp_path):
    known = trainer_arguments(read_config(some(tmp_path), asks_trl=False).model_copy(update={"method": method}))
    signature = inspect.signature(find_trainer(method)).parameters
    ours = {name for name, each in signature.items() if each.kind is each.KEYWORD_ONLY}
    if method == "async_grpo":  # it hands the others through, but for what needs the rollouts of the step itself
        ours |= {n for n, p in inspect.signature(find_trainer("grpo")).parameters.items() if p.kind is p.KEYWORD_ONLY}
        ours -= {"routing_replay"}
    assert set(known) == ours - {"quantization_config"}  # [base] says it


def test_the_adapter_is_pefts_with_pefts_names():
    from peft import LoraConfig

    ours = Adapter().model_dump(exclude={"kind", "start_from", "dtype"})
    assert set(ours) <= {each.name for each in fields(LoraConfig)}
    lora = make_lora({**ours, "r": 4, "rank_pattern": {"q_proj": 8}, "bias": "all"})
    assert (lora.r, lora.rank_pattern, lora.bias, lora.alpha_pattern) == (4, {"q_proj": 8}, "all", {})
    assert lora.task_type == "CAUSAL_LM"
    plain = LoraConfig()
    for name in set(ours) - {"r", "lora_alpha", "target_modules"}:
        assert ours[name] == getattr(plain, name), name


def test_every_alias_of_trl_is_a_field_of_it():
    known = {name for method in METHODS for name in train_fields(config_class(method))}
    for place in ALIASES.values():
        table, name = place.split()
        assert table != "[train]" or name in known
