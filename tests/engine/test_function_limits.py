"""Real vLLM computes the trainer's function of a config that is one function up to a length: its default length."""

import torch
from support import make_model

from qlora_rl import LocalEngine, load_base, prepare_base


def test_a_longrope_engine_of_default_length_computes_what_the_trainer_does(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [2.0 + i / 2 for i in range(16)],
        "original_max_position_embeddings": 64,
    }
    source = make_model(tmp_path / "model", architecture="llama", rope_parameters=rope)
    base = prepare_base(source, "none", compute_dtype="float32", out=tmp_path / "base")
    ids = torch.randint(3, 60, (1, 63), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_TV = load_base(base)(ids).logits[0]
    ours = logits_TV.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    with LocalEngine(base, max_lora_rank=0, max_num_seqs=4) as engine:
        assert engine.capabilities().max_model_length == 64
        theirs = torch.tensor(engine.score(ids.tolist())[0])
    # Rounding of float32; with the long factors they are 0.1 apart.
    assert (ours - theirs).abs().max() < 1e-4
