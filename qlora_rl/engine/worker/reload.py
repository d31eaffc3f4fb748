"""Dense weights over a loaded vLLM model, layer by layer. Names that are private to vLLM, as in `compat`; nothing else
uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from qlora_rl.engine.compat import PLUGIN_SINCE, pip_line, vllm_version
from qlora_rl.errors import EngineUnsupportedError


def reload_dense(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Write dense weights over a loaded model; names of vLLM's parameters that were written.

    The layerwise reload of vLLM's own `reload_weights`, which leaves the layers in pieces when a stream breaks in the
    middle: here they get their own tensors back (of which some are new by then), so that the next attempt starts clean.
    It also holds more than it needs, see `_Feed`. Remove when `reload_weights` does neither, and returns the names.

    Raises:
        EngineUnsupportedError: this vLLM has none.
    """
    try:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
    except ImportError as error:
        raise EngineUnsupportedError(
            f"loading weights: vLLM {vllm_version()} has no layerwise reload ({error}). Upgrade: "
            f"{pip_line(PLUGIN_SINCE)}"
        ) from error
    model = runner.get_model()
    layers = [(layer, get_layerwise_info(layer)) for layer in model.modules()]
    try:
        initialize_layerwise_reload(model)
        with torch.no_grad():
            loaded = set(model.load_weights(_Feed(weights, layers, materialize_layer)))
        finalize_layerwise_reload(model, runner.model_config)
        _pack_tied_again(model)
    except BaseException:
        for layer, info in layers:
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        raise
    finally:
        if runner.lora_config is not None:
            runner.reset_lora_state()
    return loaded


def _pack_tied_again(model: torch.nn.Module) -> None:
    """vLLM's CPU backend multiplies with a packed copy of a weight. A layer that is tied to another one, as a head to
    the embedding, is given no weight of its own, so that vLLM's reload leaves it the copy of what was there before."""
    layers: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel():
            layers.setdefault(weight.data_ptr(), []).append(layer)
    for tied in layers.values():
        for layer in tied if len(tied) > 1 else ():
            if hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


class _Feed:
    """What vLLM's loader is fed with, so that one fused layer and one weight are held next to the model, and no more.

    vLLM keeps the parts of a fused layer until all of them are there, and only then makes the layer: here each part is
    copied in when it comes. And while the next weight is made, vLLM's own loops hold the one before, and the parameters
    of a layer that has its own back: those are emptied.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], layers: list[tuple[Any, Any]], materialize: Any):
        self._weights, self._layers, self._materialize = weights, layers, materialize
        self._fused = [(layer, info) for layer, info in layers if len(getattr(layer, "output_sizes", ())) > 1]
        self._made: list[tuple[Any, str, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._weights:
            alias = weight.detach()
            del weight
            yield name, alias
            for layer, info in self._fused:
                if info.loaded_weights and info.load_numel < info.load_numel_total:
                    self._copy_in(layer, info, alias)
            self._empty(alias)
            del alias

    def _copy_in(self, layer: Any, info: Any, alias: torch.Tensor) -> None:
        """The newest part that a layer has been given."""
        absent = [name for name, parameter in layer.named_parameters(recurse=False) if parameter.is_meta]
        if absent:
            self._materialize(layer, info)
            self._made += [(layer, name, getattr(layer, name)) for name in absent]
        kept = []
        for name, call in info.loaded_weights:
            if not _reads(call, alias):
                kept.append((name, call))
                continue
            parameter = getattr(layer, name)
            loader = parameter.weight_loader
            while loader.__name__ == "online_process_loader":  # vLLM's wrapper, which only notes the part
                loader = loader.__wrapped__
            call.arguments["param"] = parameter
            loader(*call.args, **call.kwargs)
        info.loaded_weights[:] = kept

    def _empty(self, alias: torch.Tensor) -> None:
        """Let go of what nobody will read."""
        if not any(_reads(call, alias) for _, info in self._layers for _, call in info.loaded_weights):
            alias.data = alias.new_empty(0)
        unfinished = []
        for layer, name, parameter in self._made:
            if getattr(layer, name) is parameter:
                unfinished.append((layer, name, parameter))
            else:  # the layer has its own one back
                parameter.data = parameter.new_empty(0)
        self._made = unfinished


def _reads(call: Any, alias: torch.Tensor) -> bool:
    return any(value is alias for value in call.arguments.values())
