"""What may stand in the TOML file of a run: one pydantic model per table, one `option` per field.

To add a field, add its line to the model of its table: type, what it does, default, bounds. The check, `--print-schema`
and `--example` read it here. `[train]` is not here: its fields are those of TRL's config of the method, by TRL's names
(`config/trl_fields`). What a field names on disk is looked at in `config/check`, by its `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qlora_rl.contracts import ComputeWish, QuantType, SyncWish
from qlora_rl.engine.started import ENGINES
from qlora_rl.methods import AHEAD, METHODS, SAMPLING, TAUGHT, select

TEACHERS = ("none", "policy")  # words of [teacher] adapter; anything else is a directory


class Table(BaseModel):
    """A table of the file: no other fields, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their default."""
        return self.model_dump(exclude_defaults=True)


def option(
    says: str, default: Any = ..., *, kind: str = "", methods: tuple[str, ...] = (), example: Any = "...", **bounds: Any
) -> Any:
    """A field of a table.

    Args:
        says: what it does, one line.
        default: without one it must be given.
        kind: of what it names: "path", "file", "text", "adapter", "out" (made absolute), "teacher" (so, but for a
            word), "model", "url", "data" (a path, or a name on the hub), "reward", "function" ("path.py:name"),
            "where", "template", "patterns", or "" for a plain value.
        methods: the only methods that know it; empty for all.
        example: for the file to start from.
        bounds: of a number, by pydantic's names: ge, gt, le, lt.
    """
    extra: Any = {"kind": kind, "methods": list(methods), "example": example}
    return Field(default, description=says, json_schema_extra=extra, **bounds)


class Base(Table):
    """The model, and how its frozen base is held."""

    model: str = option(
        "hub name, checkpoint directory, or a base made by `qlora-rl prepare`", kind="model", example="Qwen/Qwen3-0.6B"
    )
    quant: QuantType = option("how the base is quantised", "nf4")
    double_quant: bool = option("also quantise the block scales", True)
    blocksize: Literal[64, 128, 256, 512, 1024, 2048, 4096] = option("weights that share a scale", 64)
    compute_dtype: Literal["bfloat16", "float16", "float32"] = option(
        "dtype of activations and unquantised weights",
        "bfloat16",
    )
    skip_modules: list[str] = option(
        "linears to leave unquantised, by name or part of a name", [], example=["down_proj"]
    )
    quantize_experts: bool = option("in a mixture of experts, also quantise the experts", False)
    quantize_tower: bool = option("in a vision-language model, also quantise vision tower and projector", False)
    calibrate: bool | str = option(
        "choose the codes by what the layers see of a file's rows or text, or, with `true`, of a text of ours",
        False,
        kind="text",
        example="rows.jsonl",
    )
    revision: str | None = option("branch, tag or commit on the hub", None, example="main")
    trust_remote_code: bool = option("allow the model's own code to run", False)
    attn_implementation: str | None = option("transformers' attention in the trainer", None, example="sdpa")


class Adapter(Table):
    """What is trained; the fields of PEFT's `LoraConfig`, and three of ours."""

    kind: Literal["lora", "none"] = option(
        "`none` trains all weights of a base with quant = 'none' (methods that sample, but for distill)",
        "lora",
    )
    start_from: str | None = option(
        "adapter or run directory to continue training from; its own LoraConfig is used", None, kind="adapter"
    )
    dtype: Literal["float32", "bfloat16"] = option("dtype of the trained weights", "float32")
    r: int = option("rank", 16, ge=1)
    lora_alpha: int = option("numerator of the scale alpha / r", 32, ge=1)
    target_modules: str | list[str] = option("linears to adapt, by name or pattern", "all-linear")
    exclude_modules: str | list[str] | None = option("linears to leave without an adapter", None, example=["lm_head"])
    lora_dropout: float = option("dropout before the adapter during training", 0.0, ge=0.0, lt=1.0)
    bias: Literal["none", "all", "lora_only"] = option("biases to train as well", "none")
    use_rslora: bool = option("scale by alpha / sqrt(r)", False)
    use_dora: bool = option("DoRA; synced as full weights", False)
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "pissa", "olora"] = option(
        "how to initialise the adapter; the base is unchanged", True
    )
    rank_pattern: dict[str, int] = option("ranks of individual modules, by pattern", {}, example={"q_proj": 32})
    alpha_pattern: dict[str, int] = option("alphas of individual modules, by pattern", {}, example={"q_proj": 64})
    layers_to_transform: list[int] | int | None = option("adapt only the layers with these numbers", None, example=[0])
    layers_pattern: str | list[str] | None = option("name of the module that holds the layers", None, example="layers")
    modules_to_save: list[str] | None = option(
        "modules to train in full; synced as full weights", None, example=["norm"]
    )


class Data(Table):
    """What it is trained on."""

    train: str | list[str] = option(
        ".jsonl, .json, .csv or .parquet files, or one name on the hub", kind="data", example="examples/data/sums.jsonl"
    )
    eval: str | list[str] | None = option(
        "the same for evaluation: by `qlora-rl eval`, and during training if [train] eval_strategy is set",
        None,
        kind="data",
        example="eval.jsonl",
    )
    split: str = option("split of a hub dataset to train on", "train")
    eval_split: str = option("split of a hub dataset to evaluate on", "test")
    subset: str | None = option("configuration (subset) of a hub dataset", None, example="main")
    revision: str | None = option("branch, tag or commit of a hub dataset", None, example="main")
    columns: dict[str, str] = option("rename columns: new = 'old'", {}, example={"prompt": "question"})
    prompt_template: str | None = option(
        "builds the column `prompt` from other columns; with format = 'chat' it is the user's turn",
        None,
        kind="template",
        example="Question: {question}\nAnswer:",
    )
    extract: dict[str, str] = option(
        "replace a column by what a regular expression finds in it (its group, if it has one)",
        {},
        kind="patterns",
        example={"answer": r"####\s*(.+)"},
    )
    format: Literal["plain", "chat"] = option(
        "`chat` applies the model's chat template: text in prompts becomes the user's turn, in completions the "
        "assistant's; `plain` uses text as it is",
        "plain",
    )
    system_prompt: str | None = option(
        "system message at the start of every conversation (chat)",
        None,
        example="Think step by step. End with #### and the number.",
    )
    chat_template_kwargs: dict[str, Any] = option(
        "additional arguments for the chat template (chat)",
        {},
        methods=select(lambda method: method.takes_template_kwargs),
        example={"enable_thinking": False},
    )
    images: str | None = option(
        "column with one image or a list of images: paths relative to the first file, or images stored in the dataset "
        "(chat)",
        None,
        methods=select(lambda method: method.takes_images),
        example="image",
    )
    limit: int | None = option("use only the first rows", None, ge=1, example=1000)


class Reward(Table):
    """A reward function; one `[[rewards]]` for each."""

    use: str = option(
        "`path.py:function`, or a built-in: exact_match, numeric_match, math_match, format_match, length_match, "
        "program_match",
        kind="reward",
        example="exact_match",
    )
    weight: float = option("weight of this reward in the sum", 1.0)
    arguments: dict[str, Any] = option("additional arguments for the function", {}, example={"column": "answer"})


class Teacher(Table):
    """Who says at each token what it would have said: the same base, held once, or a second model."""

    adapter: str | None = option(
        "on the student's base: `none`, `policy` (the student as it is), or the directory of an adapter or run",
        None,
        kind="teacher",
        methods=TAUGHT,
        example="runs/longer",
    )
    url: str | None = option(
        "a server, of `qlora-rl serve` or vLLM's own: what it finds likeliest at each token",
        None,
        kind="url",
        methods=TAUGHT,
        example="http://host:8000",
    )
    top_k: int = option(
        "how many tokens it is asked for; more than 20 need its --max-logprobs", 20, ge=1, methods=TAUGHT
    )
    api_key_file: str | None = option("file with the API key of that server", None, kind="file", methods=TAUGHT)
    model: str | None = option(
        "a second model in this process, with the student's tokens: as [base] model; with url, its name at the server",
        None,
        kind="model",
        methods=TAUGHT,
        example="Qwen/Qwen3-8B",
    )
    quant: QuantType = option("how that model is quantised", "nf4", methods=TAUGHT)
    prompt: str | None = option(
        "column with what it reads in place of `prompt`, such as a prompt with a hint",
        None,
        methods=TAUGHT,
        example="hinted",
    )
    prompt_template: str | None = option(
        "builds that from other columns", None, kind="template", methods=TAUGHT, example="{prompt} (It is {answer}.)"
    )
    system_prompt: str | None = option(
        "system message of what it reads (chat); by default that of [data]",
        None,
        methods=TAUGHT,
        example="Answer in one word.",
    )

    @property
    def has_prompt(self) -> bool:
        """It reads something else than the student."""
        return any(each is not None for each in (self.prompt, self.prompt_template, self.system_prompt))


class Tools(Table):
    """Functions that the model may call while it answers: TRL's `tools=`."""

    use: list[str] | None = option(
        "functions as `path.py:function`; the schema in the prompt is built from their type hints and docstrings",
        None,
        kind="function",
        methods=select(lambda method: method.takes_tools),
        example=["tools.py:calculate"],
    )


class Environment(Table):
    """Objects with a state, one for each completion, whose methods the model may call: TRL's `environment_factory=`."""

    use: str | dict[str, str] | None = option(
        "`path.py:Class`, or several by name; the column `environment` of a row then selects one",
        None,
        kind="function",
        methods=select(lambda method: method.takes_tools),
        example="game.py:Game",
    )


class Rollout(Table):
    """Where completions are sampled."""

    where: str | list[str] = option(
        "; ".join([*(f"`{name}`: {known.says}" for name, known in ENGINES.items()), "or URLs of `qlora-rl serve`"]),
        "colocate",
        kind="where",
        methods=SAMPLING,
    )
    api_key_file: str | None = option("file with the API key of that server", None, kind="file", methods=SAMPLING)
    share_base: bool | Literal["auto"] = option(
        "trainer and engine share one copy of the base", "auto", methods=SAMPLING
    )
    max_staleness: int = option("how many versions old the sampling policy may be", 1, ge=0, methods=AHEAD)
    rollout_threads: int | None = option(
        "batches sampled concurrently; default: max_staleness + 1",
        None,
        ge=1,
        methods=AHEAD,
        example=1,
    )
    base_compute: ComputeWish = option(
        "how the engine multiplies with the base on a CPU: by its 4-bit codes, or vLLM's own way",
        "nf4",
        methods=SAMPLING,
    )
    max_num_seqs: int | None = option(
        "concurrent sequences; by default all of a rollout",
        None,
        ge=1,
        methods=SAMPLING,
        example=64,
    )
    kv_cache_gib: float | None = option("size of the KV cache, in GiB", None, gt=0.0, methods=SAMPLING, example=2.0)
    enforce_eager: bool | None = option("do not use CUDA graphs", None, methods=SAMPLING, example=True)
    enable_prefix_caching: bool = option("reuse the cache of common prompt prefixes", True, methods=SAMPLING)
    vllm: dict[str, Any] = option(
        "additional arguments for `vllm.LLM` (colocate, ray)",
        {},
        methods=SAMPLING,
        example={"block_size": 32},
    )
    replicas: int = option("number of engines (ray)", 1, ge=1, methods=SAMPLING, example=4)
    ray_address: str | None = option(
        "address of the Ray cluster; by default RAY_ADDRESS, or a local cluster (ray)",
        None,
        methods=SAMPLING,
        example="auto",
    )
    ray_options: dict[str, Any] = option(
        "arguments of Ray's `.options()` for each actor (ray)", {}, methods=SAMPLING, example={"num_gpus": 1}
    )


class Sync(Table):
    """How the policy is synced to the engine, and how that is checked."""

    how: SyncWish = option(
        "`lora_adapter`, `weights` (full weights), or `auto`: whichever the adapter needs",
        "auto",
        methods=SAMPLING,
    )
    dir: str | None = option(
        "directory of adapter versions that an engine of this process must load; by default on tmpfs",
        None,
        kind="path",
        methods=SAMPLING,
    )
    canary_every: int = option(
        "after every n-th push, check that trainer and engine score fixed sequences alike; 0: never",
        4,
        ge=0,
        methods=SAMPLING,
    )
    on_mismatch: Literal["stop", "warn"] = option(
        "if rollouts come from another policy: stop the run and name the cause, or only warn",
        "stop",
        methods=SAMPLING,
    )
    allow_base_mismatch: bool = option("train even if the engine has another base", False, methods=SAMPLING)


class Run(Table):
    """The run directory, and what the run may take."""

    dir: str | None = option(
        "directory of the run; by default runs/NAME, after the name of this file", None, kind="out", example="runs/one"
    )
    existing: Literal["auto", "reject", "overwrite", "continue", "resume"] = option(
        "what to do if the directory holds a run: `auto` takes the next free name (runs/NAME-2) unless dir is set, "
        "`resume` continues from the last checkpoint",
        "auto",
    )
    seed: int = option("random seed of adapter, data order and sampling", 42, ge=0)
    gpu_memory: Annotated[float, Field(gt=0)] | Literal["auto"] = option(
        "size of the card in GB, such as 24, with or without a unit; any other number is a limit in GiB; `auto`: "
        "whatever is free",
        "auto",
        methods=select(lambda method: method.is_planned),
    )
    remove_padding: bool = option(
        "compute micro-batches without padding where the model allows it",
        True,
        methods=select(lambda method: not method.why_padded),
    )
    routing_replay: bool = option(
        "in a mixture of experts, the trainer uses the experts and routing weights that the engine chose",
        False,
        methods=select(lambda method: method.replays),
    )


class RunConfig(Table):
    """One run; the fields of `[train]` are as the file gives them.

    Attributes:
        method: one of `METHODS`.
        train: fields of TRL's config of the method.
    """

    method: Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})]
    base: Base
    adapter: Adapter = Adapter()
    data: Data
    rewards: list[Reward] = []
    teacher: Teacher = Teacher()
    tools: Tools = Tools()
    environment: Environment = Environment()
    rollout: Rollout = Rollout()
    sync: Sync = Sync()
    run: Run = Run()
    train: dict[str, Any] = {}


# In the order in which they are shown. [train] is TRL's, [[rewards]] a list of tables.
TABLES: Mapping[str, type[Table]] = MappingProxyType(
    {
        "base": Base,
        "adapter": Adapter,
        "data": Data,
        "rewards": Reward,
        "teacher": Teacher,
        "tools": Tools,
        "environment": Environment,
        "rollout": Rollout,
        "sync": Sync,
        "run": Run,
    }
)
TRAIN = "train"

# What people call a field elsewhere, and where it is here.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "lr": "[train] learning_rate",
        "epochs": "[train] num_train_epochs",
        "steps": "[train] max_steps",
        "batch_size": "[train] per_device_train_batch_size",
        "group_size": "[train] num_generations",
        "max_tokens": "[train] max_completion_length",
        "max_model_length": "[train] vllm_max_model_length",
        "gpu_memory_utilization": "[train] vllm_gpu_memory_utilization",
        "rank": "[adapter] r",
        "lora_r": "[adapter] r",
        "alpha": "[adapter] lora_alpha",
        "dropout": "[adapter] lora_dropout",
        "model_name_or_path": "[base] model",
        "dataset": "[data] train",
        "dataset_name": "[data] train",
        "reward_funcs": "[[rewards]] use",
        "teacher_model": "[teacher] model",
        "teacher_adapter": "[teacher] adapter",
        "teacher_prompt": "[teacher] prompt",
        "teacher_url": "[teacher] url",
        "api_key_file": "[rollout] api_key_file",
        "top_k": "[train] top_k",
        "environment_factory": "[environment] use",
        "load_in_4bit": "[base] quant",
        "output_dir": "[run] dir",
        "out": "[run] dir",
        "existing_run": "[run] existing",
        "resume": "[run] existing",
        "seed": "[run] seed",
        "strategy": "[sync] how",
        # [teacher] has these, too.
        "model": "[base] model",
        "quant": "[base] quant",
        "prompt_template": "[data] prompt_template",
        "system_prompt": "[data] system_prompt",
    }
)

# What people call an adapter, and how [adapter] says it.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "dora": "kind = 'lora' and use_dora = true",
        "rslora": "kind = 'lora' and use_rslora = true",
        "pissa": "kind = 'lora' and init_lora_weights = 'pissa'",
        "olora": "kind = 'lora' and init_lora_weights = 'olora'",
    }
)

# Fields of TRL's configs that have their place elsewhere in the file.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "output_dir": "[run] dir",
        "seed": "[run] seed",
        "trust_remote_code": "[base] trust_remote_code",
        "model_init_kwargs": "[base]",
        "dtype": "[base] compute_dtype",
        "chat_template_kwargs": "[data] chat_template_kwargs",
        "reward_weights": "[[rewards]] weight",
        "reward_model_path": "[[rewards]] use",
        "judge": "[[rewards]] use",
        "teacher_model_name_or_path": "[teacher] model",
        "teacher_model_revision": "[teacher] model",
        "teacher_model_init_kwargs": "[teacher]",
        "use_vllm": "[rollout] where",
        "vllm_mode": "[rollout] where",
        "vllm_server_base_url": "[rollout] where",
        "vllm_server_host": "[rollout] where",
        "vllm_server_port": "[rollout] where",
        "vllm_group_port": "[rollout] where",
    }
)
# Fields of transformers that only its example scripts read.
IDLE = ("do_train", "do_eval", "do_predict")


@cache
def options(table: type[Table]) -> Mapping[str, Mapping[str, Any]]:
    """The fields of a table as JSON Schema has them, by name: type, bounds, `default` (none: it must be given),
    `description`, and ours: `kind`, `methods`, `example`."""
    return MappingProxyType(table.model_json_schema()["properties"])


def applies(field: Mapping[str, Any], method: str) -> bool:
    """The method knows the field."""
    return not field["methods"] or method in field["methods"]
