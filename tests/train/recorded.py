"""An engine that stands where LocalEngine stands, without vLLM."""

from qlora_rl import FakeEngine, SamplingSpec, load_base


class Recorded(FakeEngine):
    """Takes what LocalEngine takes and remembers it, and every SamplingSpec; samples by the part that FakeEngine
    knows."""

    made = []

    def __init__(self, base, **options):
        super().__init__(load_base(base), max_lora_rank=options["max_lora_rank"])
        self.options, self.specs = options, []
        Recorded.made.append(self)

    def generate(self, prompts, sampling):
        self.specs.append(sampling)
        known = SamplingSpec(
            sampling.max_tokens, sampling.temperature, seed=sampling.seed, first_place=sampling.first_place
        )
        return super().generate(prompts, known)
