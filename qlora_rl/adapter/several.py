"""`LoraSet`: several LoRAs on one base, each with weights, gradients and AdamW state of its own; one is active at a
time. The base is neither copied nor changed.

A stored one is a PEFT directory with `optimizer.safetensors` next to the weights: float32, nothing pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.load import make_lora
from qlora_rl.adapter.store import CONFIG, WEIGHTS
from qlora_rl.errors import AdapterRejectedError, ConfigConflictError

OPTIMIZER = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_FUNCTION = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # of a LoraConfig: what B @ A is times
# [low, high) of AdamW's settings; without eps the step of a gradient that is 0 is 0 / 0.
_RANGES = {
    "learning_rate": (0.0, math.inf),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (torch.finfo(torch.float32).tiny, math.inf),
    "weight_decay": (0.0, math.inf),
    "grad_clip_norm": (0.0, math.inf),
}
_MLP = ("mlp", "feed_forward", "ffn")


class LoraSet:
    """The PeftModel that carries them.

    Args:
        base: the bare transformers model.

    Attributes:
        model: the PeftModel; `None` while there is no adapter, and another one after that.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self.model: Any = None
        self._parameters: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def add(self, name: str, config: Any, seed: int | None = None) -> None:
        """Put a LoRA on the base.

        Args:
            name: of PEFT's: letters, digits, and underscores.
            config: PEFT's LoraConfig.
            seed: of its A matrices; torch's random state is left as it was.
        """
        from peft import get_peft_model

        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.seed() if seed is None else torch.manual_seed(seed)
            if self.model is None:
                self.model = get_peft_model(self.base, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
        ending = f".{name}.weight"
        self._parameters[name] = {
            key.removesuffix(ending) + ".weight": parameter
            for key, parameter in self.model.named_parameters()
            if key.endswith(ending) and ".lora_" in key
        }
        self._optimizers[name] = torch.optim.AdamW(self._parameters[name].values())

    def remove(self, name: str) -> None:
        """Take a LoRA off."""
        del self._parameters[name], self._optimizers[name]
        if self._parameters:
            self.activate(next(iter(self._parameters)))
            self.model.delete_adapter(name)
        else:
            self.base, self.model = self.model.unload(), None

    def activate(self, name: str) -> None:
        """Have the model compute with this one."""
        if self.model.active_adapters != [name]:
            self.model.set_adapter(name)
        for parameter in self._parameters[name].values():
            parameter.requires_grad_(True)  # PEFT leaves that to whoever has switched adapters off

    def gradients(self, name: str) -> dict[str, torch.Tensor | None]:
        """By name of the matrix; `None` where there is none."""
        return {key: parameter.grad for key, parameter in self._parameters[name].items()}

    def take_gradients(self, name: str) -> list[torch.Tensor | None]:
        """The gradients, which the parameters no longer have."""
        taken = [parameter.grad for parameter in self._parameters[name].values()]
        for parameter in self._parameters[name].values():
            parameter.grad = None
        return taken

    def add_gradients(self, name: str, taken: list[torch.Tensor | None]) -> None:
        """Add what `take_gradients` has returned to those that there are."""
        for parameter, before in zip(self._parameters[name].values(), taken, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    def step(
        self,
        name: str,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_clip_norm: float,
    ) -> float:
        """One step of AdamW with the gradients, which are gone afterwards.

        Args:
            grad_clip_norm: 0 for no clipping.

        Returns:
            The norm of the gradients, before clipping.

        Raises:
            ConfigConflictError: a setting is out of range, there are no gradients, or they or what AdamW makes of them
                is not finite. Weights and state of the optimizer are as before, as they are after an interrupt.
        """
        given = (learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm)
        for (setting, (low, high)), value in zip(_RANGES.items(), given, strict=True):
            if not low <= value < high:
                raise ConfigConflictError(f"stepping: {setting}={value} is not in [{low:.3g}, {high:.3g}).")
        parameters = list(self._parameters[name].values())
        if all(parameter.grad is None for parameter in parameters):
            raise ConfigConflictError("stepping: there are no gradients. Call forward_backward first.")
        group, states = self._optimizers[name].param_groups[0], self._optimizers[name].state
        group |= {"lr": learning_rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        before = {parameter: {k: v.clone() for k, v in states.get(parameter, {}).items()} for parameter in parameters}
        weights = [parameter.detach().clone() for parameter in parameters]
        is_finite = False
        try:
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, grad_clip_norm or math.inf))
            if norm < math.inf:
                self._optimizers[name].step()
                made = [each for p in parameters for each in (p, *(states[p][m] for m in _MOMENTS[:2] if p in states))]
                is_finite = bool(torch.stack([each.isfinite().all() for each in made]).all())
        finally:  # an interrupt leaves no half of a step, nor gradients that are half clipped
            self.take_gradients(name)
            if not is_finite:
                with torch.no_grad():
                    for parameter, weight in zip(parameters, weights, strict=True):
                        parameter.copy_(weight)
                states.clear()
                states.update({parameter: state for parameter, state in before.items() if state})
        if not is_finite:
            raise ConfigConflictError(
                f"stepping: the norm of the gradients is {norm}, and it or the new weights are not finite. Gradients "
                "are dropped, weights and optimizer are as before; look at the advantages and logprobs of the rows, or "
                "use a lower learning rate."
            )
        return norm

    def save(self, name: str, directory: Path, *, optimizer: bool = True) -> None:
        """Write a LoRA into an existing directory, as PEFT does; with the state of its optimizer.

        Raises:
            OSError: it cannot be written.
        """
        weights = {key: value.detach().cpu().contiguous() for key, value in self._parameters[name].items()}
        _write(weights, directory / WEIGHTS)
        self.model.peft_config[name].save_pretrained(str(directory))
        written = json.loads((directory / CONFIG).read_text()) | {"inference_mode": True}
        (directory / CONFIG).write_text(json.dumps(written, indent=1, sort_keys=True))
        if optimizer:
            states = self._optimizers[name].state
            moments = {
                f"{key}.{moment}": states[parameter][moment].detach().cpu().contiguous()
                for key, parameter in self._parameters[name].items()
                if parameter in states
                for moment in _MOMENTS
            }
            _write(moments, directory / OPTIMIZER)

    def load(self, name: str, directory: Path, *, optimizer: bool = True) -> None:
        """Give a LoRA the weights of a directory that `save` has written, and the optimizer its state or none; bit for
        bit.

        Raises:
            AdapterRejectedError: it was saved of one with other layers, another rank or scaling, or without an
                optimizer.
        """
        from safetensors.torch import load_file

        saved, mine = stored_config(directory), self.model.peft_config[name]
        for key in _FUNCTION:
            if (theirs := getattr(saved, key)) != (ours := getattr(mine, key)):
                raise AdapterRejectedError(
                    f"loading the adapter {directory.name}: it has {key}={theirs}, and not {ours}. Create one like it."
                )
        held, weights = self._parameters[name], load_file(directory / WEIGHTS)
        shapes = {key: tuple(value.shape) for key, value in held.items()}
        if shapes != {key: tuple(value.shape) for key, value in weights.items()}:
            raise AdapterRejectedError(
                f"loading the adapter {directory.name}: it has other layers. Create one like it."
            )
        if optimizer and not (directory / OPTIMIZER).is_file():
            raise AdapterRejectedError(
                f"loading the adapter {directory.name}: it was saved without the state of its optimizer. Use "
                "optimizer=False."
            )
        moments: Mapping[str, torch.Tensor] = load_file(directory / OPTIMIZER) if optimizer else {}
        self.take_gradients(name)
        states = self._optimizers[name].state
        with torch.no_grad():
            for key, parameter in held.items():
                parameter.copy_(weights[key])
                states.pop(parameter, None)
                if f"{key}.step" in moments:
                    states[parameter] = {
                        moment: found if moment == "step" else found.to(parameter)
                        for moment in _MOMENTS
                        if (found := moments[f"{key}.{moment}"]) is not None
                    }


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"writing {path}: {error}") from error


def stored_config(directory: Path) -> Any:
    """The LoraConfig of a directory that `LoraSet.save` has written."""
    known = json.loads((directory / CONFIG).read_text())
    return make_lora({key: known.get(key) for key in (*_FUNCTION, "target_modules")})


def linear_targets(model: Any, *, attention: bool = True, mlp: bool = True) -> str | list[str]:
    """Names of the linears of a base that are adapted: all but the output head, or those of attention or MLP alone."""
    if attention and mlp:
        return "all-linear"
    head = model.get_output_embeddings()
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return [name for name in linears if any(part in name for part in _MLP) == mlp]
