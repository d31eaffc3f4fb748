"""Tiny vision-language models for the tests: random weights, the demo's tokenizer with the tokens that stand for
images."""

from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n", "\n\n", "\n\n\n", "\n\n\n\n")
SERVED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")


def _tokenizer(tokens):
    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer, {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}


def _text(vocabulary, **extra):
    return {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **extra,
    }


def _qwen2_5_vl():
    import transformers as hf

    tokenizer, ids = _tokenizer(QWEN)
    config = hf.Qwen2_5_VLConfig(
        text_config=_text(len(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 1e4,
        "mrope_section": [4, 6, 6]}),
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
            "window_size": 56, "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    processor = hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 16),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return hf.Qwen2_5_VLForConditionalGeneration, config, processor


def _qwen2_vl():
    import transformers as hf

    tokenizer, ids = _tokenizer(QWEN)
    config = hf.Qwen2VLConfig(
        text_config=_text(len(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 1e4,
        "mrope_section": [4, 6, 6]}),
        vision_config={"depth": 2, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 128},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    processor = hf.Qwen2VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 16),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return hf.Qwen2VLForConditionalGeneration, config, processor


def _qwen3_vl():
    import transformers as hf

    tokenizer, ids = _tokenizer(QWEN)
    config = hf.Qwen3VLConfig(
        text_config=_text(
            len(tokenizer),
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True},
        ),
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    processor = hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=32 * 32 * 16),
        tokenizer=tokenizer,
        video_processor=hf.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return hf.Qwen3VLForConditionalGeneration, config, processor


def _gemma3():
    import transformers as hf

    tokenizer, ids = _tokenizer(GEMMA)
    tokenizer.init_kwargs |= {"boi_token": GEMMA[0], "eoi_token": GEMMA[1], "image_token": GEMMA[2]}
    for name, token in zip(("boi_token", "eoi_token", "image_token"), GEMMA, strict=False):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", ids[token])
    config = hf.Gemma3Config(
        text_config=_text(len(tokenizer), sliding_window=64, query_pre_attn_scalar=32),
        vision_config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4, boi_token_index=ids[GEMMA[0]], eoi_token_index=ids[GEMMA[1]],
        image_token_index=ids[GEMMA[2]],
    )  # fmt: skip
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", GEMMA[0]),
    )
    return hf.Gemma3ForConditionalGeneration, config, processor


def make_vision_config(architecture: str, *, depth: int, width: int):
    """A config whose tower has that many layers of that width."""
    config = globals()[f"_{architecture}"]()[1]
    seen = config.vision_config
    if architecture == "gemma3":
        seen.num_hidden_layers, seen.num_attention_heads, seen.hidden_size, seen.intermediate_size = (
            depth,
            4,
            width,
            4 * width,
        )
        return config
    seen.depth, seen.num_heads = depth, 4
    if architecture == "qwen2_vl":
        seen.embed_dim = width
    else:
        seen.hidden_size, seen.intermediate_size = width, 2 * width
    return config


def make_vision_model(directory: Path, architecture: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """A random two-layer vision-language model with its processor."""
    import torch

    kind, config, processor = globals()[f"_{architecture}"]()
    torch.manual_seed(seed)
    model = kind(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                not parameter.any() and parameter.ndim >= 2
            ):  # Gemma's projector begins with zeros: no image would matter
                parameter.normal_(std=0.3)
            elif parameter.ndim >= 2:  # far enough from uniform that a wrong weight shows
                parameter.mul_(3.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def picture(seed: int, width: int = 56, height: int = 56):
    """Noise, the same for the same seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels, "RGB")
