"""Real vLLM computes the trainer's function of a config that is one function up to a length: its default length."""

import pytest
import torch
from support import make_model

from qlora_rl import LocalEngine, load_base, prepare_base

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i / 2 for i in range(16)],
    "original_max_position_embeddings": 64,
}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 2,
}


@pytest.mark.parametrize(
    ("architecture", "fields"), [("llama", {"rope_parameters": LONGROPE}), ("qwen3", MIXED)], ids=["longrope", "layers"]
)
def test_an_engine_of_default_length_computes_what_the_trainer_does(architecture, fields, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture, positions=256, **fields)
    base = prepare_base(source, "none", compute_dtype="float32", out=tmp_path / "base")
    with LocalEngine(base, max_lora_rank=0, max_num_seqs=4) as engine:
        length = engine.capabilities().max_model_length
        ids = torch.randint(3, 60, (1, length - 1), generator=torch.Generator().manual_seed(0))
        theirs = [torch.tensor(engine.score(ids[:, :tokens].tolist())[0]) for tokens in (63, length - 1)]
    model = load_base(base)
    for found in theirs:
        with torch.no_grad():
            logits_TV = model(ids[:, : len(found) + 1]).logits[0]
        ours = logits_TV.log_softmax(-1)[:-1].gather(1, ids[0, 1 : len(found) + 1, None])[:, 0]
        # Rounding of float32; of the config's length an engine is 0.49 (LongRoPE) and 1.35 (layers, 255 tokens) apart.
        assert (ours - found).abs().max() < 1e-4
    assert length == 64
