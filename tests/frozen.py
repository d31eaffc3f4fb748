"""Imported last by the server of `support.forking`: its children look for garbage only in what they have made, and
compile no kernels of DeepSpeed."""

import gc
import importlib.util
import inspect

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed.ops

    # As on a machine without a compiler: ranks of one machine would have a kernel compiled for their sums, for half a
    # minute of two cores.
    deepspeed.ops.__compatible_ops__ = {}

gc.collect()
inspect.unwrap(gc.freeze)()  # children/sitecustomize.py
