"""The methods of training that a memory estimate knows, as far as memory differs."""

METHODS = ("grpo", "rloo", "sft", "dpo", "kto", "distill")
# Those that learn from data alone: no engine is made.
OFFLINE = ("sft", "dpo", "kto")
# Those that compare with a teacher: TRL's micro-batches keep their padding.
TAUGHT = ("distill",)
# Sequences that a row of the batch has, where it is not one: DPO computes the chosen and the rejected one together.
SEQUENCES = {"dpo": 2}
