"""`DenseSync`: the whole policy is synced as dense weights; for adapters that cannot be synced alone. The trainer is
only read.

In several processes each rank pushes into its own engine, or rank 0 alone into a server. Where the trainer is sharded,
all ranks gather the same layer at the same time, whether they push it or not; a rank that fails is noticed at the next
one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from qlora_rl.adapter.inspected import own_name
from qlora_rl.adapter.merged_weights import follow_weights, iter_weights
from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.contracts import DenseEngine, Leaf, SyncReport
from qlora_rl.distributed import ranks
from qlora_rl.errors import AdapterRejectedError, SyncError
from qlora_rl.sharded_tensors import here
from qlora_rl.sync.canary import Canary


class DenseSync:
    """Every weight of the policy is made in float32, rounded once to the engine's dtype, and streamed over what it
    holds.

    Args:
        model: the live PeftModel.
        engine: serves the baked base, or another one that is not 4-bit.
        canary: checks pushes; without it a push counts as done when every weight of the engine got a value.

    Attributes:
        after: versions go on behind this one, whatever the engine serves; a run that is resumed sets it.
    """

    mode = "weights"

    def __init__(self, model: Any, engine: DenseEngine, canary: Canary | None = None):
        self.model = model
        self.engine = engine
        self.canary = canary
        self._dtype = getattr(torch, engine.capabilities().adapter_dtype)
        self._way = engine.capabilities().dense_way
        self._sent: dict[str, Leaf] = {}
        self.after = 0

    def push(self) -> SyncReport:
        """Hand the current policy to the engine as the next version.

        Raises:
            AdapterRejectedError: no weights give the live policy. SyncError: not all of them arrived. In both cases the
                old version serves if the engine is a server (which loads what has arrived whole) or nothing had been
                sent; otherwise nothing is served. The push can be repeated.
            CanaryError: they arrived, but the engine computes something else; nothing is served.
        """
        if self.canary is None:
            return self._push(is_scored=False)
        if not self.engine.holds_dense:
            self.canary.doubt()
        try:
            return self._push(is_scored=self.canary.is_due())
        except BaseException:
            self.canary.doubt()
            raise

    def _push(self, *, is_scored: bool) -> SyncReport:
        with ranks().together("pushing weights"):
            self._reject_broken()
        started, incarnation = time.perf_counter(), self.engine.incarnation
        try:
            stream, version, nbytes = self._load(digests=is_scored)
        except SyncError:
            if ranks().size > 1 or self.engine.incarnation == incarnation:
                raise
            # A server was restarted during the push: send it everything again.
            stream, version, nbytes = self._load(digests=is_scored)
        loaded = time.perf_counter()
        self._sent = stream.digests
        # An engine that was rebuilt during the push has not been verified yet.
        is_other = self.canary is not None and self.engine.incarnation != incarnation
        difference = self._check() if is_scored or is_other else None
        return SyncReport(
            version=version,
            mode=self.mode,
            transport=self._way,
            bytes=nbytes,
            tensors=stream.count,
            export_seconds=stream.seconds,
            deliver_seconds=0.0,
            load_seconds=loaded - started - stream.seconds - stream.digest_seconds,
            seconds=loaded - started - stream.digest_seconds,
            canary_seconds=time.perf_counter() - loaded + stream.digest_seconds,
            canary_difference=difference,
        )

    def verify(self) -> None:
        """Check again that the engine serves the policy; an engine that has lost it gets it again, and that push is
        checked.

        Raises:
            CanaryError: it does not; nothing is served.
        """
        if not all(ranks().gather(self.engine.holds_dense, "asking what the engine holds")):
            self.push()
            return
        if self.canary is None:
            return
        self._check()

    def close(self) -> None:
        """Nothing was left behind."""

    def _reject_broken(self) -> None:
        """Before anything is sent: whatever is trained, by an adapter or itself, must be finite."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not _is_finite(here(parameter)):
                raise AdapterRejectedError(
                    f"pushing weights: {own_name(name)} holds NaN or infinity. Lower the learning rate, or clip "
                    "gradients.",
                    module=own_name(name).rpartition(".")[0],
                )

    def _load(self, *, digests: bool) -> tuple[DenseStream, int, int]:
        stream = DenseStream(self.model, self._dtype, digests=digests)
        version = max(self.after, self.engine.version) + 1  # one that was lost does not come again
        with ranks().together("pushing weights"), self._shared_cores():
            nbytes = self.engine.load_dense(stream, version)
        self.after = version
        return stream, version, nbytes

    def _check(self) -> float:
        try:
            if not self._sent:
                with self._shared_cores():  # on as many threads as when they were sent, or a last bit may differ
                    weights = iter_weights(self.model, dtype=self._dtype)
                    self._sent = {name: digest_plain(weight) for name, weight in weights}
            return self.canary.check_weights(self._sent)
        except BaseException as error:
            self.engine.withdraw_dense(f"the canary failed for version={self.engine.version} ({type(error).__name__})")
            raise

    @contextlib.contextmanager
    def _shared_cores(self) -> Iterator[None]:
        """A server on this host reads while weights are made: threads that wait for each other in every product lose
        more, by far, than a second one gains where its core is busy."""
        threads = torch.get_num_threads()
        if self._way != "stream":
            torch.set_num_threads(max(1, threads // 2))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _is_finite(weight: torch.Tensor) -> bool:
    return not weight.numel() or bool(torch.isfinite(torch.stack(weight.detach().aminmax())).all())


class DenseStream:
    """`iter_weights`, with a stop-watch and digests of what went through.

    Attributes:
        seconds: of making the weights.
        digest_seconds: of digesting them.
        count: of weights.
        digests: of each, if they are taken.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, digests: bool):
        self._model, self._dtype, self._takes_digests = model, dtype, digests
        self.seconds = self.digest_seconds = 0.0
        self.count = 0
        self.digests: dict[str, Leaf] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        started = time.perf_counter()
        for name, weight in iter_weights(self._model, dtype=self._dtype):
            made = time.perf_counter()
            self.seconds += made - started
            if not _is_finite(weight):
                raise AdapterRejectedError(
                    f"pushing weights: {name} comes to NaN or infinity in {str(self._dtype).removeprefix('torch.')}. "
                    "Lower the learning rate, or clip gradients.",
                    module=name.rpartition(".")[0],
                )
            if self._takes_digests:
                self.digests[name] = digest_plain(weight)
                self.digest_seconds += time.perf_counter() - made
            self.count += 1
            yield name, weight
            del weight  # or two modules would be held while the next one is made
            started = time.perf_counter()

    def follow(self) -> None:
        """Another rank sends them: take part in what it has to gather."""
        follow_weights(self._model)
