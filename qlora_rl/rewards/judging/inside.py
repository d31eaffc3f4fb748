"""The process of a program whose tests use its objects: they run in its interpreter, where a program can do anything to
them.

What a program may do by mistake or by a simple trick gives it nothing; against more, docs/rewards.md says how to write
tests.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from typing import Any

from .judge import run
from .modes import expected_errors
from .names import Names
from .program import load
from .wire import read_frame

_IS, _EQUAL, _REACHED = "__judging_is__", "__judging_equal__", "__judging_reached__"
UNASKED = b"\0"  # behind the word, where the tests have asked nothing


def judge_inside(reads: int, writes: int) -> None:
    """Run the program, then say so, read the tests and the word by which they pass, and run them."""
    python, write = dict(vars(builtins)), os.write
    program = load()
    write(writes, b"\1")
    word, text = read_frame(reads), read_frame(reads).decode("utf-8", "surrogatepass")
    for name in [each for each in sys.modules if each.partition(".")[0] == "unittest"]:
        del sys.modules[name]  # the tests get one that the program has not changed
    tests = ast.parse(text)
    watched = _Watched(tests)
    names = Names(tests, python | watched.names, lambda name: getattr(program, name))
    try:
        have_passed = run(ast.fix_missing_locations(watched.visit(tests)), names)
    except SystemExit as error:
        have_passed = not error.code  # the tests' end; a program's leaves assertions out
    if have_passed and (watched.have_passed() or not names.is_asked):
        write(writes, word if names.is_asked else word + UNASKED)


class _Watched(ast.NodeTransformer):
    """Tests whose assertions say that they have been reached and are true, whatever becomes of their errors."""

    def __init__(self, tests: ast.Module):
        self._has_failed = False
        self._wanted: set[int] = set()
        self._true: set[int] = set()
        self._may_be_left = 0
        self._may_fail = "AssertionError" in map(ast.unparse, expected_errors(tests))
        self.names = {_IS: self._is, _EQUAL: _are_equal, _REACHED: self._true.add}

    def have_passed(self) -> bool:
        """Whether each assertion that is on no branch was reached, and none has failed."""
        return self._wanted <= self._true and not (self._has_failed and not self._may_fail)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """An assertion, which tells of itself."""
        is_never = isinstance(node.test, ast.Constant) and not node.test.value  # it says that it should not be reached
        number = 0 if is_never else self._number()
        self.generic_visit(node)
        node.test = _call(_IS, ast.Constant(number), node.test)
        return node

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        """`raise AssertionError`, as an assertion."""
        fails = node.exc is not None and ast.unparse(node.exc).startswith("AssertionError")
        return [ast.Expr(_call(_IS, ast.Constant(0), ast.Constant(False))), node] if fails else [node]

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """A comparison, which is false for what equals everything."""
        self.generic_visit(node)
        return _call(_EQUAL, node.left, *node.comparators) if [type(each) for each in node.ops] == [ast.Eq] else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        """`self.assertEqual(...)` and others."""
        self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("assert"):
                return [node, ast.Expr(_call(_REACHED, ast.Constant(self._number())))]
        return node

    def _visit_branch(self, node: ast.AST) -> ast.AST:
        self._may_be_left += 1
        self.generic_visit(node)
        self._may_be_left -= 1
        return node

    visit_If = visit_IfExp = visit_ExceptHandler = visit_Match = visit_While = visit_Lambda = _visit_branch

    def _number(self) -> int:
        number = len(self._wanted) + 1
        if self._may_be_left:
            return 0
        self._wanted.add(number)
        return number

    def _is(self, number: int, value: Any) -> bool:
        if value:
            self._true.add(number)
            return True
        self._has_failed = True
        return False


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _are_equal(left: Any, right: Any) -> Any:
    return (found := left == right) and not any(map(_is_equal_to_all, (left, right))) and found


def _is_equal_to_all(value: Any) -> bool:
    try:
        return type(value).__module__ != "builtins" and bool(value == object())
    except Exception:
        return False
