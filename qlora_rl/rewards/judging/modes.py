"""What tests need of the program: values, or its objects. Decided by the text of the tests alone, never by the
program."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator

from .names import PROGRAM, names_of_program

_SYNTAX = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Match)
_MODULES = frozenset({
    "abc", "asyncio", "contextlib", "dataclasses", "gc", "inspect", "io", "mock", "pickle", "sys", "threading",
    "types", "weakref",
})  # fmt: skip
_NAMES = frozenset({"id", "vars", "globals", "eval", "exec"})
_REACHING = frozenset({"getattr", "setattr", "delattr", "open", "compile", "__import__"})  # as an argument
_ATTRIBUTES = frozenset({"send", "throw", "seed", "assertLogs", "assertWarns", "mock"})
_DATA_ATTRIBUTES = frozenset({"__name__", "__doc__"})
_ASKING = frozenset({"len", "str", "repr", "list"})  # what an object answers with data
_CHANGING = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "add", "update", "discard", "setdefault", "popitem",
    "sort", "reverse",
})  # fmt: skip
_EXPECTING = frozenset({"raises", "assertRaises", "assertRaisesRegex"})


@functools.lru_cache(maxsize=4096)
def objects_needed(tests: str) -> str | None:
    """Why tests need the program's objects; `None` where they call it with data and use data that comes back."""
    try:
        found = _Tests(ast.parse(tests))
    except (SyntaxError, ValueError, RecursionError):  # no program passes them
        return None
    return next(
        (f"line {getattr(node, 'lineno', 1)}: {reason}" for node in found.nodes if (reason := found.reason(node))), None
    )


def errors_of(tests: ast.AST) -> set[str]:
    """Names of the program's for errors that the tests expect."""
    return {each.id for each in expected_errors(tests) if isinstance(each, ast.Name)} & names_of_program(tests)


def classes_of(tests: ast.AST) -> dict[str, str]:
    """Classes of the program's that the tests construct, or name as classes are named: the tests' name, and the
    program's."""
    called = {ast.unparse(node.func) for node in ast.walk(tests) if isinstance(node, ast.Call)}
    imported = {
        each.asname: each.name
        for node in ast.walk(tests)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname
    }
    return {
        name: imported.get(name, name)
        for name in names_of_program(tests) - errors_of(tests)
        if name[0].isupper() and (name in called or not name.isupper())
    }


class _Tests:
    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._program, self._errors, self._expected = (
            names_of_program(tree),
            errors_of(tree),
            list(expected_errors(tree)),
        )
        self._classes = classes_of(tree).keys()
        self._objects: set[str] = set()  # names and attributes that hold objects of the program's
        while more := {ast.unparse(each) for each in self._assigned()} - self._objects:
            self._objects |= more
        self._asserting: set[str] = set()  # functions of the tests that assert something
        while (
            more := {each.name for each in self.nodes if isinstance(each, ast.FunctionDef) and self._asserts(each)}
            - self._asserting
        ):
            self._asserting |= more

    def reason(self, node: ast.AST) -> str | None:
        """Why this node needs the program's objects."""
        parent = self._parents.get(node)
        match node:
            case _ if isinstance(node, _SYNTAX):
                return type(node).__name__
            case ast.expr() if self._is_object(node) and not self._is_asked(node, parent):
                return "an object is used otherwise than by its attributes"
            case ast.AugAssign(target=target) if ast.unparse(target) in self._objects:
                return "an operator of an object"
            case ast.Name(id=name) if name in self._classes | self._errors and not self._is_constructed(node, parent):
                return f"{name} is used otherwise than by constructing or catching it"
            case ast.Name(id=name) if name in _NAMES or (
                name in self._asserting | _REACHING and not self._is_called(node, parent)
            ):
                return f"{name} is given away"
            case ast.Attribute(attr=name) if self._is_assertion(name) and not self._is_called(node, parent):
                return f".{name} is given away"
            case ast.Lambda() | ast.GeneratorExp() if self._asserts(node):
                return "a function asserts that the program may call"
            case ast.Yield() if self._asserts(self._function(node)):
                return "a generator asserts"
            case ast.Attribute(attr=name) if name in _ATTRIBUTES or (
                name.startswith("__") and name not in _DATA_ATTRIBUTES
            ):
                return f".{name}"
            case ast.Attribute(attr=name, value=value) if (
                name in _CHANGING and self._is_called(node, parent) and self._is_held(value)
            ):
                return "a container that the program holds is changed"
            case ast.Attribute() if self._is_of_program(node) and any(node is each for each in self._expected):
                return "an error that is an attribute is expected"
            case ast.Compare(ops=ops, comparators=others) if any(isinstance(each, (ast.Is, ast.IsNot)) for each in ops):
                return None if all(map(_is_constant, others)) else "identity"
            case ast.With(items=items) if any(self._is_of_program(each.context_expr) for each in items):
                return "a context manager"
            case ast.FunctionDef(decorator_list=decorators) | ast.ClassDef(decorator_list=decorators) if any(
                map(self._is_of_program, decorators)
            ):
                return "a decorator"
            case ast.ClassDef(bases=bases) if not any("TestCase" in ast.unparse(each) for each in bases):
                return "a class of the tests"
            case ast.Import(names=names) if any(_MODULES.union(PROGRAM) & set(each.name.split(".")) for each in names):
                return "an import"
            case ast.ImportFrom(module=str(module)) if _MODULES & set(module.split(".")):
                return "an import"
        return None

    def _function(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            node = self._parents[node]
        return node

    def _is_object(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name in self._classes
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
                return ast.unparse(node) in self._objects
        return False

    def _assigned(self) -> Iterator[ast.expr]:
        for node in self.nodes:
            if isinstance(node, ast.Assign) and self._is_object(node.value):
                yield from node.targets

    def _is_asked(self, node: ast.AST, parent: ast.AST | None) -> bool:
        """Whether an object is used so that the program says nothing but what it answers."""
        match parent:
            case ast.Attribute(ctx=ctx) | ast.Subscript(ctx=ctx):
                return isinstance(ctx, ast.Load) or (isinstance(parent, ast.Attribute) and isinstance(ctx, ast.Store))
            case ast.Assign(targets=targets):
                return all(isinstance(each, (ast.Name, ast.Attribute)) for each in targets)
            case ast.Call(func=func):
                return (isinstance(func, ast.Name) and func.id in _ASKING) or self._is_of_program(func)
            case ast.List() | ast.Tuple():
                above = self._parents[parent]
                return isinstance(above, ast.Call) and self._is_of_program(above.func)
        return isinstance(parent, (ast.Expr, ast.Return))

    def _is_constructed(self, node: ast.Name, parent: ast.AST | None) -> bool:
        if node.id in self._errors:
            return any(node is each for each in self._expected)
        return self._is_called(node, parent) or (isinstance(parent, ast.Attribute) and not parent.attr.isupper())

    def _is_called(self, node: ast.AST, parent: ast.AST | None) -> bool:
        return isinstance(parent, ast.Call) and parent.func is node

    def _is_held(self, value: ast.AST) -> bool:
        """A global of the program's, or an attribute of an object of it."""
        if isinstance(value, ast.Name):
            return value.id in self._program - self._classes
        return isinstance(value, ast.Attribute) and not self._is_object(value) and self._is_of_program(value)

    def _is_of_program(self, node: ast.AST | None) -> bool:
        """Whether an expression begins with a name or an object of the program's."""
        while node is not None:
            if (isinstance(node, ast.Name) and node.id in self._program) or self._is_object(node):
                return True
            node = getattr(node, "func", None) or getattr(node, "value", None)
            node = node if isinstance(node, ast.AST) else None
        return False

    def _is_assertion(self, name: str) -> bool:
        return name.startswith("assert") or name == "fail" or name in self._asserting

    def _asserts(self, function: ast.AST) -> bool:
        return any(
            isinstance(node, (ast.Assert, ast.Raise))
            or (isinstance(node, ast.Attribute) and self._is_assertion(node.attr))
            or (isinstance(node, ast.Name) and node.id in self._asserting)
            for node in ast.walk(function)
        )


def expected_errors(tests: ast.AST) -> Iterator[ast.expr]:
    """Expressions for errors that the tests expect."""
    for node in ast.walk(tests):
        match node:
            case ast.ExceptHandler(type=ast.expr() as kinds):
                yield from kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[kinds, *_]) if name in _EXPECTING:
                yield from kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and hasattr(builtins, node.id))
