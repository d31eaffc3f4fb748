"""Which weights serve, where an engine has been given dense ones: all of one version, or none until the next
arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qlora_rl.base.reader import StoredTensors
from qlora_rl.contracts import EngineCapabilities
from qlora_rl.engine.compat import require_dense_beside_adapters
from qlora_rl.errors import AdapterRejectedError, EngineBrokenError, EngineUnsupportedError, SyncError

if TYPE_CHECKING:
    from vllm import LLM


class LoadedWeights:
    """Which weights are in an engine, and whether they may serve.

    Attributes:
        version: whose weights they are; 0 is the base directory's.
        lost: why nothing is served; empty otherwise.
        loads: sets of weights that were written over the engine's since the start.
    """

    def __init__(self) -> None:
        self.version, self.lost, self.loads = 0, "", 0

    @property
    def salt(self) -> str:
        """Part of the prefix-cache key of every request; no two sets of weights have the same."""
        return f"base-{self.loads}" if self.loads else "base"

    def reject_lost(self, *, bare: bool = False) -> None:
        """Raise where the weights that are asked for are not there."""
        if self.lost:
            raise EngineBrokenError(
                f"generating: {self.lost}. Push again, or call drop_adapter() to go on with the weights of the base "
                "directory."
            )
        if bare and self.version:
            raise EngineUnsupportedError(
                f"scoring the bare base: weights version={self.version} replaced it. Call drop_adapter() first."
            )


class DenseWeights(LoadedWeights):
    """Loads weights into the `vllm.LLM` that the engine hands in."""

    def load(
        self, llm: LLM, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, serves: int | None = None
    ) -> int:
        """Write all weights, by transformers' names; returns their bytes. See `LocalEngine.load_dense`.

        `serves` is the version that the engine serves now, `None` if it serves nothing.
        """
        counted = _Counted(weights)
        is_touched = False
        try:
            counted.pull()  # before anything is touched: the stream may not even begin
            is_touched = True
            self.loads += 1  # whatever was cached of the old weights is never asked for again
            self.version, self.lost = version, f"only a part of weights version={version} arrived"
            missing = llm.collective_rpc("qlora_load_dense", args=(counted,))[0]
            if missing:
                raise SyncError(f"no value came for {len(missing)} weights of the engine, first {missing[0]}")
        except AdapterRejectedError:  # the policy's own fault, and said so by its type
            raise
        except Exception as error:
            after = (
                "Nothing is served until a push arrives whole."
                if is_touched or self.lost or serves is None
                else f"Version {serves} goes on serving."
            )
            raise SyncError(
                f"loading weights version={version} into vLLM: {error} (after {counted.count} tensors). {after} Push "
                "again.",
                reasons=getattr(error, "reasons", ()),
            ) from error
        self.lost = ""
        return counted.nbytes

    def withdraw(self, reason: str) -> None:
        """Serve nothing until the next push."""
        self.lost = reason

    def rebuilt(self) -> None:
        """vLLM was rebuilt, on the base directory."""
        self.loads += 1
        if self.version:
            self.lost = f"weights version={self.version} were lost when the engine was rebuilt"

    def drop(self, llm: LLM, base: Path) -> None:
        """Serve the weights of the base directory again, as version 0."""
        if self.version or self.lost:
            self.load(llm, StoredTensors(base).items(), 0)

    def reject_adapters(self, max_rank: int) -> None:
        """Raise where adapters cannot be served, or the base is no longer the one that they were made for."""
        if not max_rank:
            raise EngineUnsupportedError(
                "loading an adapter: this engine was started without LoRA (max_lora_rank=0). Start it with the "
                "adapter's rank."
            )
        if self.version or self.lost:
            raise EngineUnsupportedError(
                f"loading an adapter: the engine serves dense weights version={self.version}, to which no adapter "
                "belongs. Call drop_adapter() first, which loads the base again."
            )

    def require_place(self, base: Path, capabilities: EngineCapabilities) -> None:
        """Raise where vLLM would take dense weights for packed codes, holds them in parts, or finds no place for
        them."""
        if not capabilities.takes_dense:
            raise EngineUnsupportedError(
                f"loading weights: {capabilities.name} serves {base} in 4 bits, on several GPUs or as a mixture of "
                "experts, where dense weights cannot be written. Serve the baked base: LocalEngine(bake_base(base), "
                "max_lora_rank=0)."
            )
        if capabilities.max_lora_rank:
            require_dense_beside_adapters()


class _Counted:
    """An iterable that counts what goes through it."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]):
        self._weights = iter(weights)
        self._first: list[tuple[str, torch.Tensor]] = []
        self.count = self.nbytes = 0

    def pull(self) -> None:
        """Have the first one made."""
        for pair in self._weights:
            self._first.append(pair)
            return
        raise SyncError("no weights came")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while self._first:
            yield self._noted(*self._first.pop())
        for name, weight in self._weights:
            yield self._noted(name, weight)
            del weight  # or two would be held while the next one is made

    def _noted(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.count += 1
        self.nbytes += weight.numel() * weight.element_size()
        return name, weight
