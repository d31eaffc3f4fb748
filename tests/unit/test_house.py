"""The house rules that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from core import CORE, ENTRIES, EXTRAS, extra_of

import qlora_rl

PACKAGE = Path(qlora_rl.__file__).parent
LAYERS = {
    "errors": 0, "contracts": 0, "distributed": 0, "sharded_tensors": 0, "locks": 0, "cpu_features": 0,
    "cpu_matmul": 0, "fidelity": 0, "methods": 0, "rewards": 0,
    "image_io": 0, "versions": 0, "store_messages": 0, "documents": 0, "stages": 0,
    "base": 1,
    "adapter": 2, "data": 2, "memory": 2,
    "engine": 3, "sync": 3,
    "train": 4, "torchrl": 4,
    "tinker": 5,
    "advice": 5, "config": 5, "demo": 5, "doctor": 5, "report": 5, "inference": 5, "export": 5,
    "commands": 6, "cli": 6, "__main__": 6,
}  # fmt: skip
# Which package may import which outside library (at any depth of a function).
OWNERS = {
    "bitsandbytes": {"base"},
    "peft": {"adapter", "base", "demo"},
    "vllm": {"engine"},
    "vllm_bnb_plugin": {"engine"},
    "trl": {"train", "demo"},
    "gguf": {"export"},
    "llama_cpp": {"export"},
    "torchrl": {"torchrl"},
    "tensordict": {"torchrl"},
    "ray": {"engine"},
    "deepspeed": {"train"},
    "pydantic": {"config", "tinker"},
    "fastapi": {"tinker", "engine"},
    "uvicorn": {"tinker"},
}
# Modules of vLLM that its documentation names; all others are private.
VLLM_PUBLIC = {"vllm", "vllm.entrypoints.llm", "vllm.lora.request", "vllm.sampling_params"}
# Names of vLLM's and its plugin's objects that it documents nowhere.
VLLM_PRIVATE = {
    "_adapter_manager", "lora_index_to_id", "lora_a_stacked", "bnb_quant_state", "bnb_shard_offsets", "shard_indices",
    "cpu_linear",
    "driver_worker", "openai_serving_models", "render_cmpl",
}  # fmt: skip
# The subpackages of a package, each of which imports only those before it; "" are the modules beside them.
ORDER = {
    "engine": ["", "linears", "worker", "local", "client", "fleet", "server"],
    "train": ["ranks", "scoring", "setup", "run", "rollouts", "metrics", ""],
}
# Of these, other packages import what their `__init__` hands on.
HANDED_ON = {"local", "fleet", "client", "server", "run"}
FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere in it, also for type checkers; a package counts as its
    `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
        elif isinstance(node, ast.ImportFrom) and (source := absolute(node, path)) in MODULES:
            named = {f"{source}.{alias.name}" for alias in node.names}
            found |= named & MODULES.keys()
            if not named <= MODULES.keys():
                found.add(source)
    return found


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The module that `from ... import` names, also by dots."""
    if not node.level:
        return node.module or ""
    above = path.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*above, *([node.module] if node.module else [])])


MODULES = {module(path): path for path in FILES}
IMPORTED = {name: imported_modules(path) - {name} for name, path in MODULES.items()}


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, path)
            # "from qlora_rl import train": the package is what is named.
            found += [f"qlora_rl.{alias.name}" for alias in node.names] if source == "qlora_rl" else [source]
    return found


def test_imports_go_down_the_layers():
    wrong = []
    for path in FILES:
        here = package_of(path)
        for name in imports(path) if here != "__init__" else ():
            parts = name.split(".")
            if parts[0] == "qlora_rl" and len(parts) > 1 and parts[1] in PACKAGES - {here}:
                if LAYERS[parts[1]] > LAYERS[here]:
                    wrong.append(f"{path} imports {name}, which is above it")
                if {here, parts[1]} == {"engine", "sync"}:
                    wrong.append(f"{path} imports {name}: engine and sync meet in contracts.py only")
    assert wrong == []


@pytest.mark.parametrize("package", ORDER)
def test_subpackages_import_only_those_before_them(package):
    order = ORDER[package]
    assert {f.parent.name for f in (PACKAGE / package).glob("*/__init__.py")} == set(order) - {""}

    def place(name):
        parts = name.split(".")[2:]
        is_sub = bool(parts) and f"qlora_rl.{package}.{parts[0]}" in MODULES and parts[0] in order
        return order.index(parts[0] if is_sub else "")

    for name, found in IMPORTED.items():
        if not name.startswith(f"qlora_rl.{package}."):
            continue
        for other in found:
            if other.startswith(f"qlora_rl.{package}."):
                assert place(other) <= place(name), f"{name} imports {other}, which comes after it"


def test_the_core_imports_no_extra_but_at_the_entries():
    """Nor there at the top of a module, but for type checkers."""
    assert [extra for extra in EXTRAS if not any(extra_of(name.partition(".")[2]) == extra for name in MODULES)] == []
    entered: dict[str, set[str]] = {}
    for name in filter(None, CORE):
        found = {extra for each in IMPORTED[f"qlora_rl.{name}"] if (extra := extra_of(each.partition(".")[2]))}
        if found:
            entered[name] = found
    assert entered == ENTRIES
    top = {
        name: sorted(extra for each in imported_at_import(MODULES[f"qlora_rl.{name}"]) if (extra := extra_of(each)))
        for name in ENTRIES
    }
    assert not any(top.values()), top


def test_the_architecture_page_says_how_large_the_core_is():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    stated = re.search(r"([\d,]+) statements in (\d+) modules", page)
    files = [MODULES[f"qlora_rl.{name}".rstrip(".")] for name in CORE]
    count = sum(isinstance(node, ast.stmt) for file in files for node in ast.walk(ast.parse(file.read_text())))
    assert count == pytest.approx(int(stated[1].replace(",", "")), rel=0.03)
    assert len(files) == pytest.approx(int(stated[2]), rel=0.03)


def imported_at_import(path: Path) -> set[str]:
    """Modules of ours, below `qlora_rl`, that a file imports while it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            source = absolute(node, path).partition(".")[2]
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return found


def test_packages_import_from_a_subpackage_what_it_hands_on():
    for name, found in IMPORTED.items():
        for other in found:
            parts = other.split(".")
            if len(parts) > 3 and parts[2] in HANDED_ON and name.split(".")[1] != parts[1]:
                assert other in ("qlora_rl.train.run.progress",), (
                    f"{name} imports {other}: take it from {'.'.join(parts[:3])}"
                )


def test_no_modules_import_each_other_in_a_circle():
    left = {name: set(found) for name, found in IMPORTED.items()}
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    assert not left, f"in a circle, or on the way to one: {sorted(left)}"


def test_a_folder_of_modules_is_a_package():
    """Without `__init__` it is in no wheel, and the checks of subpackages do not see it."""
    assert {path.parent for path in FILES} == {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_one_outside_library_belongs_to_one_package():
    found = [(path, name, OWNERS.get(name.split(".")[0])) for path in FILES for name in imports(path)]
    assert [
        f"{path} imports {name}, which belongs to {owners}"
        for path, name, owners in found
        if owners and package_of(path) not in owners
    ] == []


def private_names_of_vllm(path: Path) -> set[str]:
    """Modules that are imported or named in a text, attributes, and texts that are such a name (`getattr`)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [getattr(node, "attr", None), getattr(node, "value", None)]
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        texts = {name for name in names if isinstance(name, str)}
        found |= texts & VLLM_PRIVATE
        found |= {name for name in texts if re.fullmatch(r"vllm(\.[a-z_0-9]+)*", name)} - VLLM_PUBLIC
    return found


def test_private_names_of_vllm_are_only_where_contributing_says():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    row = re.search(r"^- a vLLM release: (.*?)(?=^- )", page, re.MULTILINE | re.DOTALL)[1]
    places = re.findall(r"`([\w/.]+)`", row)
    assert all((PACKAGE / place).exists() for place in places)
    found = {str(path.relative_to(PACKAGE)): names for path in FILES if (names := private_names_of_vllm(path))}
    assert {file: names for file, names in found.items() if not file.startswith(tuple(places))} == {}
    assert [place for place in places if not any(file.startswith(place) for file in found)] == []


def test_a_module_is_named_for_what_it_holds():
    assert [path for path in FILES if path.stem in {"utils", "helpers", "common"}] == []


HEAVY = ("torch", "vllm", "trl", "peft", "transformers", "bitsandbytes")


@pytest.mark.parametrize(
    "code",
    [
        "import qlora_rl",
        "from qlora_rl.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        # torch reads its log level when it is imported, and warns of NUMA nodes on some machines
        "from qlora_rl.engine.loading import quieten",
    ],
    ids=["the package", "the help of the command", "what keeps the libraries quiet"],
)
def test_what_comes_before_the_libraries_loads_none(code):
    told = f"import sys\n{code}\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_takes_at_most_a_second_beyond_torch():
    """In processor time: a busy machine does not count."""
    code = "import time, torch; t = time.process_time(); import qlora_rl; print(time.process_time() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1


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
