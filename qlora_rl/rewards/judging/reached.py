"""Assertions that a program could keep the tests from: in a `with` of its own, and in functions that it is given."""

from __future__ import annotations

import ast
import sys
from types import FrameType, TracebackType

TESTS = "tests"  # the file name of the tests' code


class Assertions:
    """Where the tests have some."""

    def __init__(self, tests: ast.Module):
        self._tests = tests
        self._functions = {
            (_first_line(node), node.name): node
            for node in ast.walk(tests)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }

    def are_in(self, function: object) -> bool:
        """Whether a function of the tests asserts anything."""
        code = getattr(function, "__code__", None)
        node = self._functions.get((code.co_firstlineno, code.co_name)) if code and code.co_filename == TESTS else None
        return node is not None and _asserts_from(node.body, 0)

    def are_skipped(self, raised: TracebackType | None) -> bool:
        """Whether an assertion is left out where the `with` that an error leaves (the caller's) suppresses it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != TESTS:
            frame = frame.f_back
        if frame is None:
            return True
        blocks = (node for node in ast.walk(self._tests) if isinstance(node, (ast.With, ast.AsyncWith)))
        block = next((each.body for each in blocks if _leaves(each, frame.f_lineno)), self._tests.body)
        inner = False
        while raised is not None:
            if raised.tb_frame.f_code.co_filename == TESTS:
                if inner and self._is_in_function(raised):
                    return True
                inner = inner or raised.tb_frame is frame
                if raised.tb_frame is frame and _asserts_from(block, raised.tb_lineno, raises=True):
                    return True
            raised = raised.tb_next
        return not inner

    def _is_in_function(self, raised: TracebackType) -> bool:
        code = raised.tb_frame.f_code
        node = self._functions.get((code.co_firstlineno, code.co_name))
        return node is not None and _asserts_from(node.body, raised.tb_lineno)


def _leaves(node: ast.With | ast.AsyncWith, line: int) -> bool:
    return node.lineno == line or any(
        each.context_expr.lineno <= line <= (each.context_expr.end_lineno or 0) for each in node.items
    )


def _asserts_from(block: list[ast.stmt], line: int, *, raises: bool = False) -> bool:
    """Whether an assertion of the block, or a loop with one, ends on this line or later.

    With `raises` an `if` that raises counts as an assertion.
    """
    nodes = [
        node for statement in block for node in ast.walk(statement) if (getattr(node, "end_lineno", 0) or 0) >= line
    ]
    loops = [each for node in nodes if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) for each in ast.walk(node)]
    found = any(map(_is_assertion, (*nodes, *loops)))
    return found or (
        raises
        and any(isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body) for node in nodes)
    )


def _is_assertion(node: ast.AST) -> bool:
    """Not one that fails wherever it is reached, which says that it should not be."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and not node.test.value)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
