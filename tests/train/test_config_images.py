"""Images in a run's file: which rows they make, what is rejected, and that prompts are TRL's."""

import json

import pytest
from datasets import Dataset, Features, Image, List, Value
from transformers import AutoProcessor
from trl.data_utils import prepare_multimodal_messages
from vision import SERVED, make_vision_model, picture

from qlora_rl.cli import main
from qlora_rl.config.launch import check_image_counts, launch
from qlora_rl.config.read import read_config
from qlora_rl.config.schema import Data
from qlora_rl.config.text import to_toml
from qlora_rl.data.load import load_data
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.errors import ConfigConflictError
from qlora_rl.inference.prompts import encode, model_inputs, with_images
from qlora_rl.inference.rows import open_images

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
LANGUAGE = r"model\.language_model\..*_proj"


@pytest.fixture
def rows(tmp_path):
    """A directory with pictures 0 to 3; writes rows.jsonl there and returns its [data]."""
    (tmp_path / "seen").mkdir()
    for number in range(4):
        picture(number).save(tmp_path / "seen" / f"{number}.png")

    def write(*values, name="picture", **fields):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2", name: each}) + "\n" for each in values))
        return Data(train=str(file), images=name, format="chat", **fields)

    return write


def pixels(images):
    return [image.convert("RGB").tobytes() for image in images]


def test_paths_count_from_the_file_and_every_row_has_a_list(rows, tmp_path):
    dataset, _ = load_data(rows("seen/0.png", None, str(tmp_path / "seen" / "2.png"), system_prompt="Look."))
    assert set(dataset.column_names) == {"prompt", "answer", "images"}
    assert dataset.features["images"] == List(Image())
    assert [pixels(row["images"]) for row in dataset] == [pixels(each) for each in ([picture(0)], [], [picture(2)])]
    assert [message["role"] for message in dataset[0]["prompt"]] == ["system", "user"]
    several, _ = load_data(rows(["seen/0.png", "seen/1.png"], [], ["seen/3.png"]))
    assert [len(each) for each in several["images"]] == [2, 0, 1]
    assert pixels(several[0]["images"]) == pixels([picture(0), picture(1)])


@pytest.mark.parametrize("kind", [Image(), List(Image()), Value("binary")])
def test_what_a_dataset_holds_itself_is_taken(tmp_path, kind):
    held = {"bytes": (tmp_path / "a.png"), "path": None}
    picture(5).save(tmp_path / "a.png")
    content = held["bytes"].read_bytes()
    value = content if kind == Value("binary") else [picture(5)] if isinstance(kind, List) else picture(5)
    features = Features({"prompt": Value("string"), "picture": kind})
    Dataset.from_list(
        [{"prompt": "a", "picture": value}, {"prompt": "b", "picture": None}], features=features
    ).to_parquet(tmp_path / "a.parquet")
    dataset, _ = load_data(Data(train=str(tmp_path / "a.parquet"), images="picture", format="chat", limit=2))
    assert [pixels(row["images"]) for row in dataset] == [pixels([picture(5)]), []]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("seen/9.png", "row 1, image 0 (seen/9.png): .*No such file"),
        ("rows.jsonl", "row 1, image 0 (rows.jsonl): it is no image"),
        (["seen/0.png", "seen/cut.png"], "row 1, image 1 (seen/cut.png): it is damaged"),
        ("https://host/a.png", "row 1, image 0 (https://host/a.png): .*No such file"),
        ("seen", "row 1, image 0 (seen): it is no file"),
        (["seen/0.png", None], "row 1, image 1: it is neither a path nor the content"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_read_is_named_before_anything_is_loaded(rows, tmp_path, value, said):
    content = (tmp_path / "seen" / "0.png").read_bytes()
    (tmp_path / "seen" / "cut.png").write_bytes(content[: len(content) // 2])
    good = ["seen/0.png"] if isinstance(value, list) else "seen/0.png"
    with pytest.raises(ConfigConflictError, match=said.replace("(", r"\(").replace(")", r"\)")):
        load_data(rows(good, value))


def test_columns_that_cannot_be_meant_are_rejected(rows):
    data = rows("seen/0.png")
    with pytest.raises(ConfigConflictError, match="'photo'"):
        load_data(Data(train=data.train, images="photo", format="chat"))
    with pytest.raises(ConfigConflictError, match=r"column image holds text.*\[data\] images = 'image'"):
        load_data(Data(train=rows("seen/0.png", name="image").train, format="chat"))
    both = Data(train=rows("seen/0.png").train, images="picture", format="chat", columns={"images": "answer"})
    with pytest.raises(ConfigConflictError, match="column images"):
        load_data(both)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


def test_a_file_is_checked_with_its_images(source, rows, tmp_path, capsys):
    data = rows(["seen/0.png", "seen/1.png"], [])
    document = {
        "method": "grpo", "base": {"model": str(source)}, "adapter": {"target_modules": LANGUAGE},
        "data": {"train": data.train, "images": "picture", "format": "chat"},
        "rewards": [{"use": "exact_match"}], "train": {"max_completion_length": 8, "vllm_max_model_length": 64},
        "rollout": {"vllm": {"limit_mm_per_prompt": {"image": 1, "video": 0}}},
    }  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(to_toml(document))
    assert main(["train", str(file), "--check"]) == 0
    config = read_config(file)
    with pytest.raises(ConfigConflictError, match="row 0 has 2 images"):
        launch(config)
    check_image_counts(read_config(file, ["rollout.vllm={}"]), load_data(config.data)[0], None)
    capsys.readouterr()
    assert main(["data", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "<|image_pad|> x 4" in shown
    assert "image 1: 56 x 56 pixels" in shown
    assert "0 of 2 rows have more than 56" in shown
    document["data"]["columns"] = {"photo": "picture"}
    file.write_text(to_toml(document))
    assert main(["train", str(file), "--check"]) == 1
    assert "'picture' is named by [data] images already" in capsys.readouterr().err


def test_a_model_for_text_takes_no_images(rows, tmp_path):
    data = rows("seen/0.png")
    document = {
        "method": "grpo", "base": {"model": "Qwen/Qwen3-0.6B"}, "rewards": [{"use": "exact_match"}],
        "data": {"train": data.train, "images": "picture", "format": "chat"},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(document))
    with pytest.raises(ConfigConflictError, match=r"\[data\] images = 'picture', and Qwen/Qwen3-0.6B takes none"):
        launch(read_config(tmp_path / "run.toml"))


@pytest.mark.parametrize("architecture", SERVED)
def test_prompts_are_those_of_trl(tmp_path, architecture):
    processor = AutoProcessor.from_pretrained(make_vision_model(tmp_path / "model", architecture))
    images = [picture(1), picture(2, 84)]
    asked = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "1+1="},
        {"role": "user", "content": "2+2="},
    ]
    placed = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "1"},
                {"type": "image"},
                {"type": "text", "text": "+"},
                {"type": "image"},
            ],
        }
    ]
    for prompt in (asked, placed):
        theirs = processor.apply_chat_template(
            [prepare_multimodal_messages(prompt, images=images)], add_generation_prompt=True, tokenize=True,
            return_dict=True
        )["input_ids"][0]  # fmt: skip
        ours = encode(processor, with_images(prompt, images))
        assert isinstance(ours, ImagePrompt)
        assert (list(ours.ids), pixels(ours.images)) == (list(theirs), pixels(images))
        assert {"pixel_values"} <= model_inputs(processor, with_images(prompt, images)).keys()
    assert isinstance(encode(processor, asked), list)
    assert encode(processor, "1+1=") == processor.tokenizer("1+1=").input_ids
    for prompt, count in ((placed, 1), (placed, 3), ([{"role": "system", "content": "a"}], 1)):
        with pytest.raises(ConfigConflictError, match="have no"):
            with_images(prompt, images[:1] * count)
    with pytest.raises(ConfigConflictError, match="the model takes none"):
        encode(processor.tokenizer, with_images(asked, images))


def test_rows_of_an_evaluation_get_their_images_by_the_runs_column(rows, tmp_path):
    data = rows("seen/0.png")
    read = [
        {"prompt": "a", "picture": "seen/1.png"},
        {"prompt": "b"},
        {"prompt": "c", "picture": ["seen/2.png", "seen/3.png"]},
    ]
    found = open_images(read, data, tmp_path)
    assert [pixels(row["images"]) for row in found] == [pixels(e) for e in ([picture(1)], [], [picture(2), picture(3)])]
    assert open_images(read, None, tmp_path) == read
    stored = {"bytes": (tmp_path / "seen/1.png").read_bytes(), "path": None}  # as a .parquet file holds them
    (kept,) = open_images([{"prompt": "a", "picture": [stored]}], data, tmp_path)
    assert pixels(kept["images"]) == pixels([picture(1)])
    for wrong in ("seen/9.png", 7, ["rows.jsonl"]):
        with pytest.raises(ConfigConflictError, match="row 1, image 0"):
            open_images([read[0], {"prompt": "b", "picture": wrong}], data, tmp_path)
