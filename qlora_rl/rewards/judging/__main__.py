"""Run by its path: makes this directory the package `judging`, without a place in the `sys.path` of the program.

A script is run here, in a process that the supervisor has forked for it and that has nothing else to do: its names are
those of this module, and its end is the interpreter's own.
"""

import importlib
import os
import sys
from types import ModuleType

if __name__ == "__main__":
    package = ModuleType("judging")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["judging"] = package
    if importlib.import_module("judging.supervisor").main() == "run":
        program = importlib.import_module("judging.program")
        for name in [each for each in globals() if not each.startswith("__") and each != "program"]:
            del globals()[name]
        __spec__ = __doc__ = __package__ = None
        program.prepare(globals())
        globals().pop("program").run(globals())
