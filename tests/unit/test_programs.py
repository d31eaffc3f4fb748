"""`program_match`: programs that cheat, odd programs that are right, and what a judgement leaves behind."""

import errno
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from datasets import Dataset

from qlora_rl import ConfigConflictError, NotYetSupportedError, RewardFunctionError
from qlora_rl.config.rewards import tell_program_tests
from qlora_rl.config.schema import Reward
from qlora_rl.rewards import program_isolation, program_match, programs
from qlora_rl.rewards.judging import calls
from qlora_rl.rewards.judging.modes import objects_needed

ADD = "def add(a, b):\n    return a + b\n"
ADDS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
ALIKE = """
class Alike:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __contains__(self, other): return True
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __hash__(self): return 0
    def __bool__(self): return True
def add(a, b): return Alike()
"""
SAY_IT = """
import os, json
for said in (b'true', b'1', b'passed', b'{"passed": true}', b'["answer", true]'):
    for fd in range(64):
        for framed in (said, len(said).to_bytes(4, "big") + said, said + b"\\n"):
            try: os.write(fd, framed)
            except OSError: pass
os._exit(0)
"""


def passes(program, tests=ADDS, **options):
    return program_match([program], tests=[tests], **{"timeout_s": 60.0, **options}) == [1.0]


@pytest.mark.parametrize("tests", [ADDS, [{"input": "1 2", "output": "3"}]], ids=["called", "run"])
def test_a_judgement_is_right_at_all(tests):
    program = ADD + "if __name__ == '__main__': print(add(*map(int, input().split())))"
    assert passes(program, tests)
    assert not passes(program.replace("+", "-"), tests)


# --- programs that cheat --------------------------------------------------------------------------------------------

# By what they do: program, tests.
CHEATS = {
    "exec is rebound": ("import builtins\nbuiltins.exec = lambda *a, **k: None", ADDS),
    "compile is rebound": ("import builtins\nbuiltins.compile = lambda *a, **k: 'None'", ADDS),
    "tests are cleared through frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for each in list(frame.f_locals.values()):\n"
        "        if isinstance(each, dict) and 'tests' in each: each['tests'] = ''\n"
        "    frame = frame.f_back",
        ADDS,
    ),
    "the token is read": (
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'token' in frame.f_locals:\n"
        "        os.write(frame.f_locals['out'], frame.f_locals['token'].encode())\n        os._exit(0)\n"
        "    frame = frame.f_back",
        ADDS,
    ),
    "the verdict is written to every descriptor": (SAY_IT, ADDS),
    "the verdict is written when it is called": (
        "def add(a, b):\n" + "".join(f"    {line}\n" for line in SAY_IT.splitlines()),
        ADDS,
    ),
    "it ends well before the tests": ("import os; os._exit(0)", ADDS),
    "it ends well when it is called": ("import os\ndef add(a, b): os._exit(0)", ADDS),
    "it exits when it is called": ("import sys\ndef add(a, b): sys.exit(0)", ADDS),
    "a thread ends it": ("import os, threading\nthreading.Timer(0.01, os._exit, (0,)).start()\ndef add(a, b):\n    while True: pass", ADDS),
    "its result equals everything": (ALIKE, ADDS),
    "its result is above everything": (ALIKE, "assert add(1, 2) > 2 and add(1, 2) < 4"),
    "its result contains everything": (ALIKE, "assert 3 in add(1, 2)"),
    "its result is at no distance": (ALIKE, "assert abs(add(1, 2) - 3) < 1e-6"),
    "its result is close to everything": (ALIKE, "import math\nassert math.isclose(add(1, 2), 3)"),
    "its result is in a list": (ALIKE.replace("return Alike()", "return [Alike()]"), "assert add(1, 2) == [3]"),
    "a number that equals everything": (
        "class Alike(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Alike(7)", ADDS),
    "a text that equals everything": (
        "class Alike(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef add(a, b): return Alike('x')",
        "assert add('a', 'b') == 'ab'",
    ),
    "a list that equals everything": (
        "class Alike(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Alike()",
        "assert add([1], [2]) == [1, 2]"),
    "abs is rebound for the tests": ("abs = lambda x: 0\ndef add(a, b): return 0", "assert abs(add(1, 2) - 3) < 1e-6"),
    "math is rebound for the tests": (
        "class math:\n    isclose = lambda *a, **k: True\ndef add(a, b): return 0",
        "assert math.isclose(add(1, 2), 3)"),
    "builtins are replaced": (
        "import builtins\nbuiltins.len = builtins.abs = builtins.sum = lambda *a: 3\nbuiltins.AssertionError = BaseException\n"
        "def add(a, b): return 0",
        ADDS + "\nassert len([add(1, 2)]) == 1",
    ),
    "the tests' failure is swallowed": ("def each(f, xs):\n    for x in xs:\n        try: f(x)\n        except BaseException: pass",
        "def is_three(x): assert x == 3\neach(is_three, [4])"),
    "tracing changes the tests": (
        "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_lines = False\n    return None\nsys.settrace(trace)\n"
        "def add(a, b): return 0", ADDS),
    "modules are replaced": (
        "import sys, types\nfor name in list(sys.modules):\n"
        "    if name not in ('sys', 'builtins', '__main__'): sys.modules[name] = types.ModuleType(name)\ndef add(a, b): return 0", ADDS),
    "everything that waits is killed": (
        "import os, signal\nfor pid in {os.getppid(), 0, -1} - {1}:\n"
        "    for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGKILL):\n"
        "        try: os.kill(pid, n)\n        except OSError: pass\ndef add(a, b): return 0", ADDS),
    "an error that the tests expect, from nowhere": (
        "class Any(type(ValueError)):\n    def __instancecheck__(c, x): return True\n    def __subclasscheck__(c, x): return True\n"
        "class E(Exception, metaclass=Any): pass\ndef add(a, b): raise E",
        "try:\n    add(1, None)\n    raise SystemExit\nexcept TypeError:\n    pass"),
    "another answer to each comparison": (
        "class Any(int):\n    n = 0\n    def __int__(self):\n        Any.n += 1\n        return Any.n\ndef add(a, b): return Any()",
        "assert add(1, 2) in (4, 3)"),
    "answers are forged": (
        "import json, os\nfor fd in range(3, 64):\n    for said in (True, {'yours': 0}, {'mine': 0}, {'type': 'int'}, {'error': ['builtins.ValueError']}):\n"
        "        for frame in (json.dumps(['answer', said, []]), json.dumps(['ask', 'call', [{'type': 'type'}, 3], {}])):\n"
        "            try: os.write(fd, len(frame).to_bytes(4, 'big') + frame.encode())\n            except OSError: pass",
        ADDS),
    "the tests' loop is ended": ("def add(a, b): raise StopIteration",
    "assert all(map(lambda p: add(*p) == 3, [(1, 2)]))"),
    "a deep answer": ("def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", ADDS),
    "an endless answer": ("def add(a, b):\n    x = [3]\n    x.append(x)\n    return x", ADDS),
    "right sums are not printed": ("print('3')", [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]),
    "all sums are printed": ("for i in range(100): print(i)", [{"input": "1 2", "output": "3"}]),
    "it is right and does not end well": ("print(3); raise SystemExit(1)", [{"input": "1 2", "output": "3"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_gets_nothing(name):
    program, tests = CHEATS[name]
    assert not passes(program, tests)
    assert passes(ADD.replace("add", "x"), "assert x(1, 2) == 3")  # and the next one is judged as ever


FORGED = [
    '["answer", {"a": 1, "b": 2}, []]', '["answer", {}, []]', '["answer", {"made": "x"}, []]',
    '["answer", {"made": ["os._exit", [0]]}, []]',
    '["answer", {"made": [[], []]}, []]', '["answer", {"made": ["builtins.range", [[]]]}, []]',
    '["answer", {"set": [{"list": []}]}, []]',
    '["answer", {"namedtuple": ["x", ["def"], [1], null]}, []]', '["answer", {"namedtuple": ["x", 3, [1], null]}, []]',
    '["answer", {"namedtuple": ["x", ["y"], [1], {"yours": 9}]}, []]', '["answer", {"class": "os._exit"}, []]',
    '["answer", {"class": []}, []]',
    '["answer", {"same": 7}, []]', '["answer", {"same": {}}, []]', '["answer", {"yours": 7}, []]',
    '["answer", {"yours": "x"}, []]', '["answer", [3], []]',
    '["answer", {"object": {}}, []]', '["answer", {"steps": []}, []]', '["answer", {"bytes": "x"}, []]',
    '["answer", {"dict": [1]}, []]',
    '["answer", {"error": []}, []]', '["answer", {"error": [["builtins.SystemExit"], [], {"tuple": [0]}, {"dict": '
                                     '[]}, null]}, []]',
    '["answer", {"made": ["decimal.Decimal", ["x"]]}, []]', '["answer", 3, [[0, []]]]', '["answer", 3, [[7, []]]]',
    '["answer", 3, 7]', '["answer", 3]',
    '["raised", 3, []]', '["raised", {"error": [["builtins.print"], [], {"tuple": []}, {"dict": []}, null]}, []]',
    '["raised", {"error": [["builtins.KeyError"], [], 3, {"dict": []}, null]}, []]',
    '["raised", {"error": [["wire.PeerGone"], [], {"tuple": []}, {"dict": []}, null]}, []]',
    '["raised", {"error": [["unittest.case.SkipTest"], [], {"tuple": []}, {"dict": []}, null]}, []]',
    '["raised", {"error": [["builtins.KeyboardInterrupt"], [], {"tuple": []}, {"dict": []}, null]}, []]',
    '["ask", {"tuple": ["get", {"tuple": [{"yours": 0}, "__globals__"]}, {"dict": []}]}, []]',
    '["ask", {"tuple": ["call", {"tuple": []}, {"dict": []}]}, []]',
    '["ask", {"tuple": ["call", {"tuple": [{"class": "builtins.type"}, 3]}, {"dict": []}]}, []]',
    '["ask", {"tuple": ["step", {"tuple": [3]}, {"dict": []}]}, []]',
    '["ask", 3, 3]', '["ask", {"tuple": [3]}, []]', "[]", "{}", "3", '["answer", ' + "[" * 10**5, '"', "",
]  # fmt: skip


@pytest.mark.parametrize("said", FORGED)
def test_a_message_that_no_program_sends_fails_the_tests(said):
    frame = len(said).to_bytes(4, "big") + said.encode()
    forge = f"import os\ndef add(a, b):\n    for fd in range(3, 64):\n        try: os.write(fd, {frame!r})\n        except OSError: pass\n    return 3"
    assert not passes(forge, "try:\n    assert add(1, 2) == 3\n    assert add(1, 2) == 3\nexcept ValueError:\n    pass")


FIND = r"""
import gc, os, re, sys
def found(blob):
    hit = re.search(rb"needle-[0-9a-f]{32}", blob)
    return hit and hit.group().decode()
def blobs():
    yield repr((sys.argv, dict(os.environ), os.getcwd())).encode()
    for each in gc.get_objects():
        try: yield repr(each).encode()
        except BaseException: pass
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            yield os.read(fd, 10**6)
        except OSError: pass
    for path in PATHS:
        try: yield open(path, "rb").read()
        except OSError: pass
    ids = ["self", str(os.getppid()), *map(str, range(max(2, os.getpid() - 40), os.getpid() + 5))]
    for pid in ids:
        for name in ("cmdline", "environ"):
            try: yield open(f"/proc/{pid}/{name}", "rb").read()
            except OSError: pass
        try:
            memory = open(f"/proc/{pid}/mem", "rb", 0)
            maps = open(f"/proc/{pid}/maps").read()
        except OSError: continue
        for start, end, kind in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (rw)", maps, re.M):
            try:
                memory.seek(int(start, 16))
                yield memory.read(int(end, 16) - int(start, 16))
            except (OSError, ValueError, OverflowError, MemoryError): pass
def answer():
    for blob in blobs():
        if found(blob): return found(blob)
"""


def needle():
    return "needle-" + os.urandom(16).hex()


@pytest.fixture(
    params=[("namespace", "landlock"), ("namespace",), ("landlock",), ()], ids=lambda p: "+".join(p) or "neither"
)
def means(request, monkeypatch):
    """By what files and processes are hidden: everything, each alone, nothing."""
    monkeypatch.setattr(programs, "_MEANS", request.param)
    for each, said in program_isolation().items():
        if each in request.param and said != "active":
            pytest.skip(f"{each}: {said}")
    return request.param


def test_the_expected_answer_is_nowhere_to_be_found(tmp_path, means):
    wanted = needle()
    (tmp_path / "tests.txt").write_text(wanted)
    find = FIND.replace("PATHS", repr([str(tmp_path / "tests.txt")] if means else []))
    if not means:  # then what other processes of this user show is in the kernel's hands
        find = find.replace("str(os.getppid()), *map", "*map").replace(
            "*map(str, range(max(2, os.getpid() - 40), os.getpid() + 5))", ""
        )
    assert not passes(find, f"assert answer() == {wanted!r}")
    assert not passes(find + "print(answer())", [{"input": "", "output": wanted}])
    # The search does find what is there.
    assert passes(f"here = {wanted!r}\n" + find, f"assert answer() == {wanted!r}")


# --- tests that compare values, and tests that do not
# -------------------------------------------------------------------------

VALUES = {
    "calls": "assert add(1, b=2) == 3 and sorted(f([2, 1])) == [1, 2] and len(f('x')) == 1 and 'a' in f('abc')",
    "HumanEval": "def check(candidate):\n    assert candidate(1) == 2\ncheck(add)",
    "a constant": "assert LIMIT == 3 and f(1) is None and type(f(2)) is int",
    "LeetCode": "assert Solution().twoSum([2, 7], target=9) == [0, 1]",
    "methods and attributes": "s = Stack()\ns.push(1)\nassert s.pop() == 1 and len(s) == 0 and s.items == []",
    "objects as arguments": "assert dist(Point(0, 0), Point(3, 4)) == 5.0 and most([Point(0, 0), Point(3, 4)], 1) == 4",
    "an error of Python's": "try: f(-1)\nexcept ValueError as e: assert 'negative' in str(e)\nelse: assert False",
    "an error of its own": "try: f(-1)\nexcept (EmptyError, KeyError) as e: assert e.code == 3",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.a = Account()\n    def test_it(self):\n"
        "        self.assertEqual(self.a.pop(3), 1)\n        with self.assertRaises(EmptyError): self.a.pay(9)\nunittest.main()"
    ),
    "callbacks": "assert each(lambda x: x + 1, [1]) == [2] and order(['a'], key=len) == ['a']",
    "no Python": "assert f( == 3",
}
OBJECTS = {
    "equality": "assert Point(1, 2) == Point(1, 2)",
    "arithmetic": "a = Vector(1)\nassert (a + a).x == 2",
    "arithmetic in place": "b = Basket()\nb += 'apple'\nassert len(b) == 1",
    "truth and iteration": "s = Stack()\nfor x in s: assert x",
    "isinstance": "assert isinstance(f(), Dog)",
    "identity": "assert f() is g()",
    "an enum": "assert Color.RED.name == 'RED'",
    "a manager": "with timer() as t: assert t.x == 1",
    "async": "import asyncio\nassert asyncio.run(f()) == 3",
    "a class of the tests": "class Node: pass\nassert f(Node()) == 1",
    "a decorator": "@memo\ndef g(x): return x\nassert g(1) == 1",
    "a check that it may leave out": "def check(x): assert x == 3\neach(check, [3])",
    "a method that it may leave out": (
        "import unittest\nclass T(unittest.TestCase):\n    def check(self, x): self.assertEqual(x, 3)\n    def test_it(self): each(self.check, [3])"
    ),
    "an assertion that it may leave out": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): each(self.assertTrue, [3])",
    "assertions that it may leave out": "def eq(a, b): assert a == b\nrun(eq(f(x), x) for x in [1, 2])",
    "a lambda that asserts": "def eq(a, b): assert a == b\nrun(lambda: eq(f(1), 2))",
    "an error that is an attribute": "try: f()\nexcept Stack.Empty: pass",
    "an error that is raised": "def g(): raise Stop('x')\nassert f(g) == 1",
    "a list that it holds": "log.append(1)\nassert total() == 1",
    "a mock": "from unittest.mock import Mock\nf(Mock())",
    "its source": "import inspect\nassert inspect.signature(f).parameters",
    "names by text": "assert eval('f(1)') == 2",
}


@pytest.mark.parametrize("name", VALUES)
def test_tests_that_compare_values_need_no_objects(name):
    assert objects_needed(VALUES[name]) is None


@pytest.mark.parametrize("name", OBJECTS)
def test_tests_that_need_the_programs_objects_are_told_by_their_text(name):
    assert objects_needed(OBJECTS[name]).startswith("line ")


def test_once_a_line_says_how_many_rows_a_program_can_cheat(caplog):
    programs._SAID.clear()
    tests = [ADDS, [{"input": "1", "output": "1"}], OBJECTS["equality"], OBJECTS["an enum"]]
    program_match(["x = 1"] * 4, tests=tests, timeout_s=60.0)
    program_match(["x = 1"] * 3, tests=tests[1:], timeout_s=60.0)
    (said,) = [each for each in caplog.messages if "cheat" in each]
    assert said.startswith(
        "2 of 4 rows compare values; the tests of 2 use the program's objects and run in its interpreter"
    )


def test_a_run_says_before_it_starts_how_many_rows_a_program_can_cheat(caplog):
    rows = Dataset.from_dict({"asked": [ADDS, OBJECTS["identity"], ADDS], "prompt": ["a", "b", "c"]})
    for arguments, said in (({"column": "asked"}, 1), ({}, 0)):
        programs._SAID.clear()
        caplog.clear()
        tell_program_tests([Reward(use="program", arguments=arguments), Reward(use="exact_match")], rows)
        assert sum(each.startswith("2 of 3 rows compare values") for each in caplog.messages) == said


def test_tests_of_unittest_that_fail_fail_where_nobody_looks_at_the_result():
    case = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(add(1, 2), 3)\n"
    for end in (
        "unittest.main(exit=False)",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    ):
        assert passes(ADD, case + end)
        assert not passes(ADD.replace("+", "-"), case + end)
        assert not passes(ADD.replace("+", "-"), case + "import sys\n" + end)  # in the program's interpreter


# --- odd programs that are right ------------------------------------------------------------------------------------

ODD = {
    "bytes to stdout": ("import sys\nsys.stdout.buffer.write(b'x' * 1000)\n" + ADD, ADDS),
    "bytes to descriptor 1": ("import os\nos.write(1, b'x')\n" + ADD, ADDS),
    "text to the first stdout": ("import sys\nprint('x', file=sys.__stdout__)\n" + ADD, ADDS),
    "a main block that reads": (ADD + "if __name__ == '__main__':\n    print(add(int(input()), int(input())))", ADDS),
    "text to stderr": ("import sys\nprint('x', file=sys.stderr)\n" + ADD, ADDS),
    "much text": ("print('x' * 10**7)\n" + ADD, ADDS),
    "stdout is closed": ("import sys\nsys.stdout.close()\n" + ADD, ADDS),
    "stdout is replaced": ("import io, sys\nsys.stdout = io.StringIO()\nprint(1)\n" + ADD, ADDS),
    "names of Python are used": ("list = len = print = str = exec = None\n" + ADD, ADDS),
    "a thread": (
        "import threading\ndef add(a, b):\n    out = []\n    t = threading.Thread(target=lambda: out.append(a + b))\n"
        "    t.start(); t.join()\n    return out[0]", ADDS),
    "a pool of threads and a deep stack": (
        "import sys, threading\nfrom concurrent.futures import ThreadPoolExecutor\nsys.setrecursionlimit(10**6)\n"
        "threading.stack_size(2**25)\ndef deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def add(a, b):\n    with ThreadPoolExecutor(1) as pool: return pool.submit(deep, a + b).result()", ADDS),
    "asyncio": ("import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x\ndef add(a, b): return asyncio.run(later(a + b))", ADDS),
    "ctypes": ("import ctypes\ndef add(a, b): return ctypes.c_int(a + b).value", ADDS),
    "exec inside": ("exec('def add(a, b): return a + b')", ADDS),
    "from the future": ("from __future__ import annotations\n" + ADD, ADDS),
    "a dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Sum:\n    a: int\n    b: int\n"
        "    def total(self) -> int: return self.a + self.b", "assert Sum(1, 2).total() == 3 and Sum(1, 2).a == 1"),
    "a class with a state": (
        "class Stack:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n    def pop(self): return self.all.pop()\n"
        "    def __len__(self): return len(self.all)",
        "s = Stack()\nassert not s\ns.push(1); s.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.all == [1]\n"
        "try: s.pop(); s.pop()\nexcept IndexError: pass\nelse: assert False"),
    "a class that is a dict": (
        "from collections import OrderedDict\nclass Cache(OrderedDict):\n    def get_or(self, k): return self.get(k, -1)",
        "c = Cache()\nc['a'] = 1\nassert c.get_or('a') == 1 and c.get_or('b') == -1 and c == {'a': 1} and 'a' in c"),
    "a node that is linked": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef total(n): return 0 if n is None else n.v + total(n.next)",
        "a, b = Node(1), Node(2)\na.next = b\nassert total(a) == 3 and a.next is b and a.next.next is None"),
    "a generator": ("def upto(n):\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(upto(3), 3)) == [3, 4, 5] and 9 in upto(1)"),
    "a function that returns one": ("def add(a): return lambda b: a + b", "assert add(1)(2) == 3"),
    "a function that takes one": ("def each(f, xs): return [f(x) for x in xs]",
        "assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str, (1,)) == ['1']"),
    "a decorator": ("import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a): return 2 * f(*a)\n    return g",
        "@twice\ndef three(x): return x\nassert three(3) == 6"),
    "an error of its own": ("class Empty(ValueError): pass\ndef first(xs):\n    if not xs: raise Empty('none')\n    return xs[0]",
        "try: first([])\nexcept Empty as e: assert str(e) == 'none' and isinstance(e, ValueError)\nelse: assert False"),
    "a list changed in place": ("def sort(xs): xs.sort()",
    "x = [3, 1, 2]\nassert sort(x) is None\nassert x == [1, 2, 3]"),
    "a list that is appended and returned": ("def grow(xs):\n    new = [len(xs)]\n    xs.append(new)\n    return new, xs",
        "x = []\nnew, same = grow(x)\nassert x == [[0]] == same\nnew.append(1)\nsame.append(2)\nassert x == [[0, 1], 2]"),
    "many kinds of values": (
        "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import Counter, namedtuple, deque\nimport datetime\n"
        "P = namedtuple('P', 'x y')\nall_ = [None, True, 1.5, 2**20000, float('inf'), 1j, 'a\\ud800', b'a', (1, (2,)), {1, 2}, frozenset({3}),"
        " {(1, 2): [3]}, range(3), Decimal('0.1'), Fraction(1, 3), Counter('aab'), P(1, 2), deque([1])]\ndef values(): return all_",
        "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\n"
        "assert values() == [None, True, 1.5, 2**20000, float('inf'), 1j, 'a\\ud800', b'a', (1, (2,)), {1, 2}, frozenset({3}), {(1, 2): [3]}, "
        "range(3), Decimal('0.1'), Fraction(1, 3), {'a': 2, 'b': 1}, (1, 2), deque([1])]\nassert values()[-2].x == 1\n"
        "assert type(values()[8]) is tuple and isinstance(values()[9], set)"),
    "an enum": ("import enum\nclass Color(enum.IntEnum):\n    RED = 1\ndef color(): return Color.RED",
        "assert color() is Color.RED and color() == Color.RED and color() == 1 and color().name == 'RED'"),
    "a named tuple that can do something": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\n    def norm(self): return self.x + self.y\n"
        "def p(): return P(1)", "assert p().norm() == 3 and p() == (1, 2) and p().x == 1 and list(p()) == [1, 2]"),
    "arguments of any name": (
        "def f(self, operation, function, remote, each): return each(operation=self + operation + function + remote)\n"
        "def g(**k): return k['self']",
        "assert f(self=1, operation=2, function=3, remote=4, each=lambda **k: k['operation'] + 1) == 11 and g(self=1) "
        "== 1"),
    "a recursion as deep as may be": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(990) == 990"),
    "a constant and a module": ("import math\nLIMIT = 3\ndef area(r): return math.pi * r * r",
        "assert LIMIT == 3 and math.isclose(area(1), math.pi)"),
    "a function named as one of Python's": ("def sum(a, b): return a + b\ndef bisect(a, b): return (a + b) / 2",
        "from program import sum\nassert sum(1, 2) == 3 and bisect(1, 2) == 1.5"),
    "a recursion with a cache": ("from functools import cache\n@cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "assert fib(90) == 2880067194370816120"),
    "HumanEval's form": (ADD,
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(a=1, b=2) == 3\ncheck(add)"),
    "a list of assertions": (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]),
    "a signal handler and a limit": (
        "import resource, signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\nresource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "import random, re, zoneinfo, heapq, itertools, json, datetime, string, sqlite3, hashlib, uuid\n" + ADD, ADDS),
}  # fmt: skip
# Read two numbers, write their sum.
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22\n", "output": "42"}]
ODD_RUNS = {
    "input": "a, b = map(int, input().split())\nprint(a + b)",
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "lines": "import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "os.read and os.write": "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 100).split())))",
    "buffers": "import sys\nsys.stdout.buffer.write(str(sum(map(int, sys.stdin.buffer.readline().split()))).encode())",
    "the first stdout": "import sys\nprint(sum(map(int, input().split())), file=sys.__stdout__)",
    "a main block": "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
    "a thread that nobody joins": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def main(): print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()"
    ),
    "a recursion as deep as may be": (
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nassert f(990) == 990\nprint(sum(map(int, input().split())))"
    ),
    "exit()": "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
    "a writer of its own": "out = open(1, 'w')\nout.write(str(sum(map(int, input().split()))))",
    "another writer": "import sys\nsys.stdout = open(1, 'w', buffering=2**20)\nprint(sum(map(int, input().split())))",
    "exit() of nobody": "print(sum(map(int, input().split())))\nexit()",
    "_exit": "import os, sys\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)",
    "at its end": "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
    "white space": "print(sum(map(int, input().split())), '  \\n\\n')",
    "no end of line": "print(sum(map(int, input().split())), end='')",
    "stderr": "import sys\nprint('x' * 10**6, file=sys.stderr)\nprint(sum(map(int, input().split())))",
    "pickled by name": (
        "import pickle\nclass A:\n    pass\npickle.loads(pickle.dumps(A()))\nprint(sum(map(int, input().split())))"
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_program_that_is_right_passes(name):
    program, tests = ODD[name]
    assert passes(program, tests)


@pytest.mark.parametrize("name", ODD_RUNS)
def test_an_odd_program_that_reads_and_writes_passes(name):
    assert passes(ODD_RUNS[name], SUMS)
    assert not passes(ODD_RUNS[name], [*SUMS, {"input": "1 1", "output": "3"}])


def test_large_inputs_and_outputs_pass():
    text = "".join(f"{i}\n" for i in range(200_000))
    assert passes("import sys\nfor line in sys.stdin: print(line, end='')", [{"input": text, "output": text}])


# --- tests that test nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests", [None, "", " \n", [], "'a text'", "def check(f):\n    assert f(1, 2) == 3", "assert 1 == 1"]
)
def test_tests_that_ask_nothing_of_the_program_give_no_reward(tests, caplog):
    programs._SAID.clear()
    assert program_match([ADD], tests=[tests], timeout_s=60.0) == [None]
    assert "nothing of the program" in caplog.text


@pytest.mark.parametrize("tests", [3, [3], [{"input": "1"}], {"a": 1}])
def test_tests_of_another_form_are_rejected(tests):
    with pytest.raises(ConfigConflictError, match=r"column 'tests'.*\"input\""):
        program_match([ADD], tests=[tests])


# --- what the kernel takes ------------------------------------------------------------------------------------------


REACHES = {
    "a file to write": "open('file', 'w')", "a file to write elsewhere": "open('/tmp/qlora-rl-file', 'w')",
    "a file to remove": "import os; os.remove('/tmp/x')",
    "a socket": "import socket; socket.socket()",
    "a pair of sockets that carries messages": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "a process": "import os; os.fork()", "a program": "import os; os.execv('/bin/true', "
                                                      "['true'])",
                                                      "a shell": "import subprocess; subprocess.run('true', shell=True)",
    "a signal to another": "import os; os.kill(os.getppid(), 0)",
    "a signal by the back door": "import fcntl, os; fcntl.fcntl(0, 8, os.getppid())",
    "memory in a file": "import os; os.memfd_create('x')",
    "another limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another root": "import os; os.chroot('/')", "another user": "import os; os.setuid(1)",
    "another session": "import os; os.setsid()",
    "much memory": "x = 'x' * 10**10", "packages": "import torch",
}  # fmt: skip


@pytest.mark.parametrize("name", REACHES)
def test_what_reaches_out_fails_with_an_error_that_a_program_can_catch(name):
    assert not passes(f"{REACHES[name]}\n{ADD}")
    kinds = "(OSError, MemoryError, ValueError, ImportError)"
    assert passes(f"try:\n    {REACHES[name]}\nexcept {kinds}:\n    {ADD.replace(chr(10), chr(10) + '    ')}")


def test_files_of_this_user_are_hidden_and_where_they_are_not_a_line_says_so(tmp_path, means, caplog):
    (tmp_path / "file").write_text("x")
    programs._SAID.clear()
    for path in (tmp_path / "file", "/etc/passwd"):
        reads = f"def read():\n    try: return bool(open({str(path)!r}).read(1))\n    except OSError: return False"
        assert passes(reads, "assert not read()") == bool(means)
    assert ("files of this user can be read" in caplog.text) == (not means)


def test_packages_of_the_interpreter_are_hidden_in_a_namespace():
    if (said := program_isolation()["namespace"]) != "active":
        pytest.skip(f"namespaces: {said}")
    packages = [
        p for p in (Path(os.__file__).parent / name for name in ("site-packages", "dist-packages")) if p.exists()
    ]
    if not any(os.listdir(each) for each in packages):
        pytest.skip("this interpreter has no directory of packages of its own")
    look = f"import os\ndef look(): return [x for p in {list(map(str, packages))} for x in os.listdir(p)]"
    assert passes(look, "assert look() == []")


@pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare to take user namespaces away with")
def test_where_the_kernel_denies_namespaces_programs_are_judged_without():
    """In a namespace of its own, in which no more can be made."""
    code = (
        "from qlora_rl.rewards import program_isolation, program_match\n"
        f"print(program_match([{ADD!r}, 'x = 1'], tests=[{ADDS!r}] * 2, timeout_s=60.0), program_isolation())"
    )
    denying = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", denying, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"this kernel has denied one to begin with: {done.stderr.strip()}")
    assert done.stdout.startswith("[1.0, 0.0] {'namespace': '[Errno ")


def test_a_machine_that_cannot_filter_system_calls_runs_nothing(tmp_path, monkeypatch):
    main = programs._JUDGING
    other = tmp_path / "main.py"
    other.write_text(
        "import os, types\nos.uname = lambda: types.SimpleNamespace(machine='riscv64')\n"
        f"__file__ = {str(main)!r}\nexec(compile(open(__file__).read(), __file__, 'exec'))"
    )
    monkeypatch.setattr(programs, "_JUDGING", other)
    with pytest.raises(NotYetSupportedError, match=r"riscv64.*path.py:function"):
        program_match([ADD], tests=[ADDS], timeout_s=60.0)


def test_another_system_than_linux_runs_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotYetSupportedError, match=r"darwin.*path.py:function"):
        program_match([ADD], tests=[ADDS])


def test_a_supervisor_that_fails_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "main.py").write_text("raise OSError('no more processes')")
    monkeypatch.setattr(programs, "_JUDGING", tmp_path / "main.py")
    with pytest.raises(RewardFunctionError, match="no more processes"):
        program_match([ADD], tests=[ADDS], timeout_s=60.0)


def outcome(filtered, arch, number, *arguments):
    """What the kernel does with a system call under a filter: a machine of its few instructions."""
    data = struct.pack("IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at = value = 0
    while True:
        code, so, otherwise, constant = filtered[at]
        at += 1
        if code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(constant, constant & 0xFFFF)
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, constant)
        else:
            at += so if (value == constant if code == 0x15 else value & constant) else otherwise


@pytest.mark.parametrize(("machine", "arch", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)])
def test_the_filter_allows_what_it_names_and_nothing_else(machine, arch, column):
    filtered = calls.rules(machine, 77)
    assert len(filtered) < 4096
    assert all(0 <= jump < 256 for _, a, b, _ in filtered for jump in (a, b))
    allowed = {numbers[column] for numbers in calls._ALLOWED.values()} - {-1}
    some = {numbers[column] for numbers in calls._WITH_ARGUMENTS.values()} - {-1}
    for number in range(600):
        said = outcome(filtered, arch, number, 2**31, 2**31 + os.O_RDWR, os.O_RDWR)
        assert said == ("allow" if number in allowed else errno.ENOSYS if number == 435 else errno.EPERM), number
        assert outcome(filtered, arch, number | 0x40000000) == errno.EPERM  # x32's
    assert outcome(filtered, arch ^ 1, 0) == "kill"
    for name, right, wrong in (
        ("openat", (0, 0, os.O_CLOEXEC), (0, 0, os.O_CREAT)), ("clone", (0x3D0F00,), (17,)), ("kill", (77, 9), (1, 9)),
        ("kill", (77, 9), (0, 9)),
        ("tgkill", (77, 78, 9), (78, 78, 9)), ("fcntl", (0, 3), (0, 8)), ("ioctl", (0, 0x5401), (0, 0x5412)), ("prctl",
            (15,), (1,)),
        ("prlimit64", (0,), (78,)), ("socketpair", (1, 1), (1, 2)), ("socketpair", (1, 1 | os.O_CLOEXEC), (2, 1)),
    ):  # fmt: skip
        number = calls._WITH_ARGUMENTS[name][column]
        assert number in some
        assert outcome(filtered, arch, number, *right) == "allow"
        assert outcome(filtered, arch, number, *wrong) == errno.EPERM


# --- what a judgement leaves ----------------------------------------------------------------------------------------


def rss_mib(name="VmRSS"):
    return (
        int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)).split()[1]) / 1024
    )


ENDLESS = ["import os\nwhile True: os.write(1, b'x' * 65536)",
"import sys\nwhile True: sys.stdout.buffer.write(b'x' * 65536)",
    "while True: print('x' * 65536)",
    "import os\nfor fd in range(64):\n    try:\n        while True: os.write(fd, b'x' * 65536)\n    except OSError: pass",
]  # fmt: skip


@pytest.mark.parametrize("tests", [ADDS, [{"input": "", "output": "3"}]], ids=["called", "run"])
@pytest.mark.parametrize("program", ENDLESS)
def test_endless_output_costs_the_trainer_no_memory(program, tests):
    highest, ended = [rss_mib()], threading.Event()
    before = highest[0]

    def watch():
        while not ended.wait(0.005):
            highest[0] = max(highest[0], rss_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert not passes(program, tests, timeout_s=1.0)
    finally:
        ended.set()
        watching.join()
    assert highest[0] - before < 16


def test_endless_answers_cost_the_trainer_no_memory():
    before = rss_mib("VmHWM")
    assert not passes("def add(a, b): return 'x' * 10**8", timeout_s=5.0, memory_mib=1024)
    assert not passes("def add(a, b): return list(range(10**7))", timeout_s=5.0, memory_mib=1024)
    assert rss_mib("VmHWM") - before < 16


def children(marker):
    """Processes whose command line or name holds the marker."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if marker in (each / "cmdline").read_bytes() + (each / "comm").read_bytes():
                    found.append(each.name)
            except OSError:
                pass
    return found


OUTLIVES = {
    "fork_exec": (
        "import _posixsubprocess as p, os, inspect\nr, w = os.pipe()\n"
        "for more in ((None, None, None, -1, None, True), (None, None, None, -1, None)):\n"
        "    try:\n        p.fork_exec([b'/bin/sleep', b'MARK'], (b'/bin/sleep',), True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, True, -1, *more)\n"
        "    except (TypeError, OSError): pass"
    ),
    "fork": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    NAME\n    time.sleep(MARK)",
    "vfork through C": "import ctypes, time\nc = ctypes.CDLL(None)\nif c.fork() == 0:\n    c.setsid()\n    NAME\n    time.sleep(MARK)",
    "clone through C": "import ctypes, time\nc = ctypes.CDLL(None)\nif c.syscall(56, 17, 0, 0, 0, 0) == 0:\n    NAME\n    time.sleep(MARK)",
    "exec": "import os\nos.execv('/bin/sleep', ['sleep', 'MARK'])",
    "spawn": "import os\nos.posix_spawn('/bin/sleep', ['sleep', 'MARK'], {})",
    "a thread that goes on": "import threading, time\nNAME\nthreading.Thread(target=time.sleep, args=(MARK,)).start()",
    "a deaf process": "import signal, time\nNAME\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(MARK)",
}


@pytest.mark.parametrize("name", OUTLIVES)
def test_no_process_outlives_its_judgement(name):
    mark = str(10**8 + int.from_bytes(os.urandom(4), "big"))  # seconds to sleep; and a name of 15 characters at most
    named = "import ctypes; ctypes.CDLL(None).prctl(15, b'MARK', 0, 0, 0)"  # PR_SET_NAME
    program = ADD + OUTLIVES[name].replace("NAME", named).replace("MARK", mark)
    for tests in (ADDS, [{"input": "", "output": "3"}]):
        passes(program, tests, timeout_s=1.0)
        assert children(mark.encode()) == []


def test_no_process_outlives_a_trainer_that_is_killed():
    mark = str(10**8 + int.from_bytes(os.urandom(4), "big"))
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)\ntime.sleep(1000)"
    code = (
        f"from qlora_rl.rewards import program_match\nprogram_match([{program!r}], tests=['assert 1'], timeout_s=300.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as trainer:
        until(lambda: children(mark.encode()))
        trainer.kill()
    until(lambda: not children(mark.encode()))


def until(is_so):
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < 30
        time.sleep(0.02)
