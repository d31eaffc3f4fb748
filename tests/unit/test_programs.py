"""`program_match`: programs that cheat, odd programs that are right, and what a judgement leaves behind."""

import os
import threading
from pathlib import Path

import pytest

from qlora_rl import ConfigConflictError
from qlora_rl.rewards import program_match

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


# --- programs that cheat -----------------------------------------------------------------------------------------------------

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
    "its result lies in a list": (ALIKE.replace("return Alike()", "return [Alike()]"), "assert add(1, 2) == [3]"),
    "a number that equals everything": (
        "class Alike(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Alike(7)", ADDS),
    "a text that equals everything": (
        "class Alike(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef add(a, b): return Alike('x')",
        "assert add('a', 'b') == 'ab'",
    ),
    "a list that equals everything": (
        "class Alike(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Alike()", "assert add([1], [2]) == [1, 2]"),
    "abs is rebound for the tests": ("abs = lambda x: 0\ndef add(a, b): return 0", "assert abs(add(1, 2) - 3) < 1e-6"),
    "math is rebound for the tests": (
        "class math:\n    isclose = lambda *a, **k: True\ndef add(a, b): return 0", "assert math.isclose(add(1, 2), 3)"),
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


def test_the_expected_answer_is_nowhere_to_be_found(tmp_path):
    wanted = needle()
    (tmp_path / "tests.txt").write_text(wanted)
    find = FIND.replace("PATHS", repr([str(tmp_path / "tests.txt")]))
    assert not passes(find, f"assert answer() == {wanted!r}")
    assert not passes(find + "print(answer())", [{"input": "", "output": wanted}])
    # The search does find what is there.
    assert passes(f"here = {wanted!r}\n" + find, f"assert answer() == {wanted!r}")


# --- odd programs that are right ---------------------------------------------------------------------------------------------

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
    "a list changed in place": ("def sort(xs): xs.sort()", "x = [3, 1, 2]\nassert sort(x) is None\nassert x == [1, 2, 3]"),
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
    "a constant and a module": ("import math\nLIMIT = 3\ndef area(r): return math.pi * r * r",
        "assert LIMIT == 3 and math.isclose(area(1), math.pi)"),
    "a function named as one of Python's": ("def sum(a, b): return a + b\ndef bisect(a, b): return (a + b) / 2",
        "from program import sum\nassert sum(1, 2) == 3 and bisect(1, 2) == 1.5"),
    "a recursion with a cache": ("from functools import cache\n@cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "assert fib(90) == 2880067194370816120"),
    "HumanEval's form": (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(a=1, b=2) == 3\ncheck(add)"),
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
    "exit()": "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
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


# --- tests that test nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests", [None, "", " \n", [], "'a text'", "def check(f):\n    assert f(1, 2) == 3", "assert 1 == 1"]
)
def test_tests_that_ask_nothing_of_the_program_give_no_reward(tests, caplog):
    assert program_match([ADD], tests=[tests], timeout_s=60.0) == [None]
    assert "nothing of the program" in caplog.text


@pytest.mark.parametrize("tests", [3, [3], [{"input": "1"}], {"a": 1}])
def test_tests_of_another_form_are_rejected(tests):
    with pytest.raises(ConfigConflictError, match=r"column 'tests'.*\"input\""):
        program_match([ADD], tests=[tests])


# --- what a judgement leaves -------------------------------------------------------------------------------------------------


def rss_mib(name="VmRSS"):
    return (
        int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)).split()[1]) / 1024
    )


ENDLESS = ["import os\nwhile True: os.write(1, b'x' * 65536)", "import sys\nwhile True: sys.stdout.buffer.write(b'x' * 65536)",
    "while True: print('x' * 65536)", "import os\nfor fd in range(64):\n    try:\n        while True: os.write(fd, b'x' * 65536)\n    except OSError: pass",
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
        assert not passes(program, tests, timeout_s=2.0)
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
        passes(program, tests, timeout_s=2.0)
        assert children(mark.encode()) == []
