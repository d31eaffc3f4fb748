"""vLLM's worker on the CPU for models in which the tokens of an image attend to each other in both directions. Named to
vLLM as `worker_cls`.

vLLM's runner says where the images of a batch stand; its CPU backend (0.31) leaves that out, and attends causally. Here
the rows of images are computed once more, each image as a sequence that ends with it and is not causal: whatever stands
before an image, its tokens see in either case.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from qlora_rl.engine.worker.extension import BaseExtension


class Worker(CPUWorker, BaseExtension):
    """What vLLM is told to start; it names the extension itself, as `gpu.Worker` does."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, with the backend below in every attention layer; without images it is vLLM's own."""
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.BothWaysBackend")
        super().load_model(*arguments, **options)


class BothWaysBackend(CPUAttentionBackend):
    """vLLM's CPU backend, and images in both directions."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """It does."""
        return True

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Below."""
        return BothWaysAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Below."""
        return BothWaysBuilder


class BothWaysBuilder(CPUAttentionMetadataBuilder):
    """Describes the images of a batch besides its sequences."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """vLLM's metadata with `rows` (places in the batch, one for each token of an image) and `images` (its metadata,
        a sequence for each image)."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.rows = None
        spans = common_attn_metadata.mm_req_doc_ranges or {}
        begins, lengths = made.query_start_loc.tolist(), made.seq_lens.tolist()
        rows: list[int] = []
        starts, ends, owners = [0], [], []
        for request, images in spans.items():
            here, length = begins[request], lengths[request]
            known = length - (begins[request + 1] - here)  # positions of earlier steps
            for first, last in images:
                if last < known or first >= length:
                    continue
                if last >= length:
                    raise RuntimeError(
                        f"an image's tokens {first} to {last} are split over steps, of which one ends at {length}"
                    )
                rows += range(here + max(first, known) - known, here + last + 1 - known)
                starts.append(len(rows))
                ends.append(last + 1)
                owners.append(request)
        if rows:
            made.rows, made.images = torch.tensor(rows), self._images(made, starts, ends, owners)
        return made

    def _images(
        self, whole: CPUAttentionMetadata, starts: list[int], ends: list[int], owners: list[int]
    ) -> CPUAttentionMetadata:
        begin, length = (torch.tensor(each, dtype=torch.int32) for each in (starts, ends))
        since_0_31 = {"kv_cache_dtype": self.kv_cache_dtype} if hasattr(self, "kv_cache_dtype") else {}
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(owners),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=length,
            dtype=self.dtype,
            query_start_loc=begin,
            causal=False,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=False,
            **since_0_31,
        )
        return CPUAttentionMetadata(
            num_actual_tokens=starts[-1],
            max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
            query_start_loc=begin,
            max_seq_len=max(ends),
            seq_lens=length,
            block_table=whole.block_table[owners].contiguous(),
            slot_mapping=whole.slot_mapping,
            scheduler_metadata=schedule,
            causal=False,
        )


class BothWaysAttention(CPUAttentionBackendImpl):
    """vLLM's attention, and the rows of images once more."""

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor, *scales: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """As vLLM's."""
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options)
        rows = None if attn_metadata is None else attn_metadata.rows
        if rows is not None:
            part = torch.empty_like(output[rows])
            super().forward(layer, query[rows], key, value, kv_cache, attn_metadata.images, part)
            output[rows] = part
        return output
