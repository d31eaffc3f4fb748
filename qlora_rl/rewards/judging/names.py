"""What names of the tests mean that they neither define nor import: Python's own, the library's, or the program's."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

# What tests use of the library without an import; a program must not define how it is compared.
_HELPERS = {
    "math": ("isclose", "fabs", "floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "inf", "nan", "pi", "tau"),
    "copy": ("deepcopy",),
    "functools": ("reduce",),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
}
PROGRAM = ("program", "solution")  # modules that the tests may import it from
_MODULES = {name: module for module, names in _HELPERS.items() for name in names}
# Names under which packages are known that no program has.
_PACKAGES = frozenset({
    "np", "numpy", "pd", "pandas", "pytest", "torch", "tf", "tensorflow", "scipy", "sp", "sklearn", "plt",
    "matplotlib", "nx", "networkx", "sympy", "jax", "hypothesis", "mock", "parameterized", "approx", "raises",
    "allclose",
})  # fmt: skip


def names_of_program(tests: ast.AST) -> set[str]:
    """Names in the tests that are the program's.

    A name of Python's is never one, and neither is one of `_HELPERS` where the tests have another, or one under which
    a module of the library is used (`math.pi`): the program would decide how it is tested. `from program import sum`
    always is.
    """
    own = {name for node in ast.walk(tests) for name in _bound(node)}
    imported = {
        each.asname or each.name
        for node in ast.walk(tests)
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM
        for each in node.names
    }
    free = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)} - own - set(vars(builtins)) - _PACKAGES
    free = {name for name in free if not name.startswith("__")}
    modules = {
        node.value.id
        for node in ast.walk(tests)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    free -= modules & sys.stdlib_module_names
    return imported | (free - _MODULES.keys() or free)


class Names(dict[str, Any]):
    """The tests' `__builtins__`: Python's names, then the library's, then the program's.

    Args:
        tests: what runs with these names.
        python: names of Python's, as they are before the program runs.
        of_program: gives the value of a name of the program's; raises `AttributeError`.
    """

    def __init__(self, tests: ast.AST, python: dict[str, Any], of_program: Callable[[str], Any]):
        super().__init__(python)
        self._program, self._of_program = names_of_program(tests), of_program
        self.is_asked = False

    def __missing__(self, name: str) -> Any:
        if name not in self._program:
            if name in _MODULES:
                return getattr(importlib.import_module(_MODULES[name]), name)
            if name in sys.stdlib_module_names:
                return importlib.import_module(name)
            if name in _PACKAGES or name.startswith("__"):
                raise KeyError(name)
        try:
            return self.of_program(name)
        except AttributeError:
            raise KeyError(name) from None

    def of_program(self, name: str) -> Any:
        """Raises: AttributeError: the program has no such name."""
        value = self._of_program(name)
        self.is_asked = True
        return value


def _bound(node: ast.AST) -> list[str]:
    """Names that a node of the tests gives a meaning to."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)):
        return [node.name] if node.name else []
    return [node.arg] if isinstance(node, ast.arg) else []
