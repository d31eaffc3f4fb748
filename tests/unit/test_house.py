"""The house rules that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qlora_rl

PACKAGE = Path(qlora_rl.__file__).parent
FLOORS = {
    "errors": 0, "contracts": 0, "distributed": 0, "held": 0, "processor": 0, "products": 0, "fidelity": 0, "rewards": 0,
    "base": 1,
    "adapter": 2, "ledger": 2,
    "engine": 3, "sync": 3, "advice": 3,
    "train": 4, "torchrl": 4,
    "bench": 5, "config": 5, "demo": 5, "report": 5, "policy": 5, "export": 5,
    "commands": 6, "cli": 6, "__main__": 6,
}  # fmt: skip
# Which room may import which outside library (at any depth of a function).
OWNERS = {
    "bitsandbytes": {"base"},
    "peft": {"adapter", "bench", "demo"},
    "vllm": {"engine"},
    "vllm_bnb_plugin": {"engine"},
    "trl": {"train", "demo"},
    "gguf": {"export"},
    "triton": {"engine"},
    "torchrl": {"torchrl"},
    "tensordict": {"torchrl"},
    "ray": {"torchrl", "engine"},
    "deepspeed": {"train"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_the_floors(path):
    here = room(path)
    if here == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "qlora_rl" or len(parts) < 2 or parts[1] == here:
            continue
        assert FLOORS[parts[1]] <= FLOORS[here], f"{path} imports {name}, which is above it"
        assert {here, parts[1]} != {"engine", "sync"}, f"{path} imports {name}: the two wings have no door"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_one_outside_library_belongs_to_one_room(path):
    for name in imports(path):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or room(path) in owners, f"{path} imports {name}, which belongs to {owners}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_holds_one_idea(path):
    assert len(path.read_text().splitlines()) <= 500
    assert path.stem not in {"utils", "helpers", "common"}


def test_importing_the_package_loads_no_library():
    code = (
        "import sys; import qlora_rl; "
        "print([m for m in ('torch','vllm','trl','peft','transformers','bitsandbytes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_takes_at_most_a_second_beyond_torch():
    """In processor time: a busy machine does not count."""
    code = "import time, torch; t = time.process_time(); import qlora_rl; print(time.process_time() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1


def test_the_help_of_the_command_loads_nothing_heavy():
    code = (
        "import sys; from qlora_rl.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch','vllm','trl','transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_what_keeps_the_libraries_quiet_comes_before_torch():
    """Torch reads its log level when it is imported, and warns of NUMA nodes on some machines."""
    code = "import sys; from qlora_rl.demo.job import quieten; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_runs_as_a_module_too():
    """In a notebook's kernel `qlora-rl` need not be on the PATH."""
    done = subprocess.run([sys.executable, "-m", "qlora_rl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"qlora-rl {qlora_rl.__version__}\n"


def test_every_public_name_exists_and_is_documented():
    for name in qlora_rl.__all__:
        value = getattr(qlora_rl, name)
        assert value.__doc__, name


def test_every_error_is_in_the_tree_of_the_docstring_and_is_a_standard_error_too():
    from qlora_rl import errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.QloraRLError) and value is not errors.QloraRLError:
            assert re.search(rf"{name} +\((\w+)\)", errors.__doc__), name
            assert len(value.__mro__) > 4, name


def test_an_error_keeps_all_of_its_reasons():
    from qlora_rl.errors import ConfigConflictError, collected

    error = collected("reading", ["one thing", "another"], ConfigConflictError)
    assert error.reasons == ("one thing", "another")
    assert "2 reasons" in str(error)
    assert str(collected("reading", ["one thing"], ConfigConflictError)) == "reading: one thing"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by their names alone: of two, one is not run."""
    names = sorted(file.name for file in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert names == sorted(set(names))
