"""Both sides of a weight sync on one float32 base: logprobs agree to the last bits, or something is wrong."""

import importlib.util

import pytest

# This very directory would pass for an empty package of that name.
if importlib.util.find_spec("torchrl.weight_update") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def base32(model_dir):
    """The tiny checkpoint as an NF4 base that computes in float32."""
    from qlora_rl import prepare_base

    return prepare_base(model_dir, compute_dtype="float32")


@pytest.fixture(scope="session")
def baked32(base32):
    """The same weights, dequantised."""
    from qlora_rl import bake_base

    return bake_base(base32)


@pytest.fixture(scope="session")
def other_base32(other_model_dir):
    """Another one."""
    from qlora_rl import prepare_base

    return prepare_base(other_model_dir, compute_dtype="float32")
