"""4-bit codes seen as floats: the same bytes, the same function."""

import pytest
import torch

from qlora_rl import load_base
from qlora_rl.base.fingerprint import compare, fingerprint_base
from qlora_rl.base.quant import store_as


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_seen_as_floats_have_the_same_digest_and_compute_the_same(base, dtype):
    plain, seen = load_base(base), load_base(base)
    store_as(seen, dtype)
    weight = seen.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == dtype
    assert weight.shape[1] == 1
    assert not compare(fingerprint_base(plain), fingerprint_base(seen)).entries
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, seen(ids).logits)
