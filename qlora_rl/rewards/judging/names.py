"""What names of the tests mean that they neither define nor import: Python's own, the library's, or the program's."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

from .values import is_standard

# What tests use without an import on what the program has returned: a program must not define how it is compared.
_HELPERS = {
    "math": ("isclose", "fabs", "floor", "ceil", "trunc", "isnan", "isinf", "isfinite"),
    "copy": ("deepcopy",),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
}
# Names under which packages are known that no program has.
_PACKAGES = frozenset(
    [
        "np",
        "numpy",
        "pd",
        "pandas",
        "pytest",
        "torch",
        "tf",
        "tensorflow",
        "scipy",
        "sp",
        "sklearn",
        "plt",
        "matplotlib",
        "nx",
        "networkx",
        "sympy",
        "jax",
        "hypothesis",
        "mock",
        "parameterized",
        "approx",
        "raises",
        "allclose",
    ]
)


class Names(dict[str, Any]):
    """What the tests can name: what they define and import, then Python's own names, then what the program defines.

    A name of Python's, or of a module of its library, is never the program's: it would decide how it is tested. Neither
    is one of `_HELPERS` that the tests call with a result of the program's. `from program import sum` always is.

    Args:
        tests: what runs with these names.
        from_library: asks the program where a name of it comes from.
        from_program: asks the program for its value.
    """

    def __init__(
        self, tests: ast.Module, from_library: Callable[[str], str | None], from_program: Callable[[str], Any]
    ):
        super().__init__(__name__="__main__", __builtins__=_Builtins(self))
        self._from_library, self._from_program = from_library, from_program
        self._of_modules = {
            node.value.id
            for node in ast.walk(tests)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        self._helpers = helpers(tests)
        self.is_answered = False  # by a name that the program has imported

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name in _PACKAGES or name.startswith("__"):
            raise KeyError(name)  # looked for in `builtins` next
        if name in self._helpers:
            return self._helpers[name]
        try:
            source = self._from_library(name)
        except AttributeError:
            source = None
        if (
            isinstance(source, str)
            and is_standard(source)
            and "__main__" not in source
            and source != "unittest.main.main"
        ):
            module, _, own = source.rpartition(".")
            if source in sys.stdlib_module_names or own == name:
                self.is_answered = True
                return getattr(importlib.import_module(module), own) if module else importlib.import_module(source)
        if name in sys.stdlib_module_names and name in self._of_modules:  # `math.pi`, imported by the program alone
            return importlib.import_module(name)
        try:
            value = self._from_program(name)
        except AttributeError:
            raise KeyError(name) from None
        if any(value is each for each in (AssertionError, BaseException, SystemExit, KeyboardInterrupt, GeneratorExit)):
            raise KeyError(name)  # it would catch what says that the program is wrong, or end the tests well
        return value


class _Builtins(dict[str, Any]):
    """A class statement's own code looks for names here without asking `Names` for missing ones."""

    def __init__(self, names: Names):
        super().__init__(vars(builtins))
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names.__missing__(name)


def helpers(tests: ast.Module) -> dict[str, Any]:
    """Names of the library that the tests call with a result of the program's, as in `isclose(area(1), 3.14)`."""
    own = {name for node in ast.walk(tests) for name in _bound(node)}
    public = {name: getattr(importlib.import_module(module), name) for module in _HELPERS for name in _HELPERS[module]}
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)} - own
    of_program = {
        name
        for name in used
        if name not in public and name not in sys.stdlib_module_names and not hasattr(builtins, name)
    }
    while more := {name for node in ast.walk(tests) for name in _assigned(node, of_program)} - of_program:
        of_program |= more
    found = set()
    for node in ast.walk(tests):
        if isinstance(node, ast.Call):
            parts = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
            if any(_calls(each, of_program) for each in parts[1:]):
                found |= {each.id for each in parts if isinstance(each, ast.Name)}
    return {name: public[name] for name in found & used & public.keys()}


def _bound(node: ast.AST) -> list[str]:
    """Names that a node of the tests gives a meaning to."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    return [node.arg] if isinstance(node, ast.arg) else []


def _assigned(node: ast.AST, of_program: set[str]) -> list[str]:
    """Names that get a result of the program's."""
    match node:
        case ast.arg(arg=name):  # a `candidate`
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _calls(value, of_program):
            return [name]
        case ast.Assign(targets=targets, value=value) if _calls(value, of_program):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value) if _calls(
            value, of_program
        ):
            return [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.NamedExpr(target=ast.Name(id=name), value=value) if _calls(value, of_program):
            return [name]
    return []


def _calls(node: ast.AST, of_program: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in of_program for each in ast.walk(node))
