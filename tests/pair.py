"""One base on both sides, and adapters that are put on the trainer's and pushed; for tests of exactness and their
benchmark."""

from __future__ import annotations

import copy
import warnings

import torch
from peft import get_peft_model

from qlora_rl import export_adapter, load_base
from qlora_rl.adapter.store import write_adapter

SEQUENCES = [[40, 41, 42, 43, 44, 45, 46, 47], [60, 9, 33, 12, 7, 41, 5, 21]]
OPTIONS = {"max_lora_rank": 512, "max_model_length": 32, "max_num_seqs": 8}


class Pair:
    """A base on both sides; adapters are put on the trainer's, and pushed."""

    def __init__(self, engine, base, directory):
        self.engine, self.base, self.directory, self.version = engine, load_base(base), directory, 0
        self.dtype = getattr(torch, engine.capabilities().adapter_dtype)

    def adapted(self, config, prepare=None, seed=0):
        """A PeftModel whose B has random values, on the trainer's base; the one before it is taken off."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(self.base), config)
        generator = torch.Generator().manual_seed(seed)
        if prepare:
            prepare(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ("lora_B" in name or "lora_A" in name) and not p.any():  # MiCA starts with an empty A
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.05 / max(1, p.shape[-1]) ** 0.25)
        return model.eval()

    def difference(self, model, bundle=None, directory=None):
        """Largest |trainer - vLLM| over all logprobs, in nats, with the bundle (or another directory) served."""
        self.version += 1
        if directory is None:
            directory = self.directory / str(self.version)
            directory.mkdir()
            write_adapter(bundle or export_adapter(model, dtype=self.dtype), directory)
        self.engine.load_adapter(directory, self.version)
        return self.apart(model)

    def apart(self, model, *, scaled=False):
        """The same with what serves now; `scaled` divides by |logprob| above one nat, as float32 rounds."""
        theirs = self.engine.score(SEQUENCES)
        with torch.no_grad():
            logprobs_BTV = model(torch.tensor(SEQUENCES)).logits.float().log_softmax(-1)
        ours_BT = logprobs_BTV[:, :-1].gather(2, torch.tensor(SEQUENCES)[:, 1:, None])[..., 0]
        size_BT = ours_BT.abs().clamp(min=1.0) if scaled else 1.0
        return float(((ours_BT - torch.tensor(theirs)).abs() / size_BT).max())


class Noisy:
    """A 4-bit trainer beside a 16-bit engine on the baked base: what they differ by is rounding, which is asked for in
    shares."""

    def __init__(self, engine, base, baked):
        self.engine, self.base, self.baked = engine, load_base(base), load_base(baked)
        self.sequences = torch.randint(3, 60, (16, 24), generator=torch.Generator().manual_seed(0))
        self.bare = self._differences(self.base)

    def start(self, kind):
        """A model of a kind on the 4-bit base, or on the baked one where PEFT cannot start or run it on 4 bits."""
        return trained(self.base if kind.on_4bit else self.baked, kind, scale=kind.scale)

    def share(self, model):
        """Mean and largest |trainer - vLLM| over all logprobs with what serves now, of those of the bare base."""
        found = self._differences(model)
        return float(found.mean() / self.bare.mean()), float(found.max() / self.bare.max())

    def _logits(self, model):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(self.sequences).logits.float()

    def _differences(self, model):
        logprobs_BTV = self._logits(model).log_softmax(-1)
        ours_BT = logprobs_BTV[:, :-1].gather(2, self.sequences[:, 1:, None])[..., 0]
        return (ours_BT - torch.tensor(self.engine.score(self.sequences.tolist()))).abs()


def trained(base, kind, seed=0, scale=0.02):
    """A PeftModel of a kind (tests/kinds.py) on a copy of `base`, with random values in all that is trained."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), kind.config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * scale)
    if kind.prepare:
        kind.prepare(model)
    return model.eval()


def breaking(weights, at, error):
    """The first `at` tensors, then an exception."""
    for i, pair in enumerate(weights):
        if i == at:
            raise error
        yield pair
