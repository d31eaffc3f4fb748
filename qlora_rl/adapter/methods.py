"""What each method of PEFT does to a model: a change of weights, or something else. A table only.

Written down from PEFT 0.21.2: each method was built on a small model with random values, and each adapted layer
compared with the affine map that it gives on the identity (tests/unit/test_verdict.py does it again). Methods whose
layers are no such map, or that work elsewhere than in layers, cannot be held by any weights.
"""

from __future__ import annotations

# Adapted layers are affine in their input: some dense weight (and, where the layer has one, bias) gives the same
# function.
CHANGES_WEIGHTS: dict[str, str] = {
    "ADALORA": "scales each rank by a trained value",
    "ADAMSS": "adds low-rank updates in subspaces of the weight",
    "BEFT": "trains biases",
    "BOFT": "rotates the weight",
    "C3A": "adds a block-circulant matrix",
    "DEFT": "projects the weight and adds to it",
    "DELORA": "adds a normalised low-rank update",
    "FOURIERFT": "adds a matrix with few frequencies",
    "FROD": "adds an update in a joint decomposition of the weights",
    "GLORA": "scales and shifts weight and bias",
    "GRALORA": "adds low-rank blocks",
    "HIRA": "multiplies the weight with a low-rank matrix, element by element",
    "HRA": "reflects the weight",
    "IA3": "scales inputs or outputs of layers",
    "LN_TUNING": "trains norms",
    "LOHA": "adds a Hadamard product of low-rank matrices",
    "LOKR": "adds a Kronecker product",
    "MISS": "adds a sum over shards",
    "OFT": "rotates the weight",
    "OSF": "trains the weight in a subspace",
    "PEANUT": "adds a network of the weight",
    "PSOFT": "rotates the principal part of the weight",
    "PVERA": "adds scaled random matrices, sampled while training",
    "RANDLORA": "adds a sum of scaled random matrices",
    "ROAD": "rotates outputs in pairs",
    "SHIRA": "adds a sparse matrix",
    "SUPERTUNING": "trains a sparse part of the weight",
    "TINYLORA": "adds an update of a few numbers",
    "TRAINABLE_TOKENS": "trains rows of the embedding",
    "UNILORA": "adds low-rank matrices out of one vector",
    "VBLORA": "adds low-rank matrices out of a bank of vectors",
    "VERA": "adds scaled random matrices",
    "WAVEFT": "adds a matrix with few wavelets",
}

# No weights give the same function.
CHANGES_SOMETHING_ELSE: dict[str, str] = {
    "ADAPTION_PROMPT": "adds trained tokens to the attention",
    "CARTRIDGE": "is a trained KV cache",
    "CPT": "trains tokens of a context",
    "LILY": "routes each input to experts",
    "MULTITASK_PROMPT_TUNING": "trains tokens before the prompt, per task",
    "POLY": "mixes adapters by the task of each request",
    "PREFIX_TUNING": "is a trained KV cache",
    "PROMPT_TUNING": "trains tokens before the prompt",
    "P_TUNING": "trains tokens before the prompt",
    "SHADOW": "adds a second network",
    "XLORA": "mixes adapters by the input",
}

# Variants of LoRA, by class (peft.tuners.lora.variants): is its forward pass B @ A and nothing else?
PLAIN_VARIANTS: dict[str, str] = {
    "MiCALinearVariant": "MiCA freezes B",
    "VeloraLinearVariant": "VeLoRA compresses what the backward pass keeps",
}
WEIGHT_VARIANTS: dict[str, str] = {
    "BdLoraLinearVariant": "BD-LoRA has block-diagonal matrices",
    "DoraEmbeddingVariant": "DoRA scales each row of the weight",
    "DoraLinearVariant": "DoRA scales each row of the weight",
    "KasaLinearVariant": "KaSA cuts the base and scales each rank",
    "MiCAEmbeddingVariant": "MiCA on an embedding",
    "MontecloraLinearVariant": "MonteCLoRA samples A while training",
    "QALoraLinearVariant": "QALoRA averages groups of inputs",
}
INPUT_VARIANTS: dict[str, str] = {
    "ALoraLinearVariant": "aLoRA depends on where its invocation tokens stand in the input",
    "ArrowLinearVariant": "Arrow routes each input to adapters",
}

# How LoRA may start, where that is a word: leaving the base as it is, or changing it.
HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
