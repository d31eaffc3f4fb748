"""`Calibration`: what was asked for where a base is prepared, and what came of it. What chooses codes and measures
(`base/calibration`) is imported when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.quant import Measured, QuantSpec, quantize_linear
from qlora_rl.base.reader import StoredTensors
from qlora_rl.base.writer import read_tokenizer
from qlora_rl.errors import ConfigConflictError
from qlora_rl.stages import begin

if TYPE_CHECKING:
    from qlora_rl.base.calibration.text import Row

logger = logging.getLogger(__name__)

# Of what is computed here: another number gives other bytes for the same text.
_METHOD = "1"


class Calibration:
    """Quantises by a text, measures, or neither.

    Args:
        rows: `None` quantises plainly.
        measure: how far the base is from its source; `None` does so where there are rows.
        spec: of the base.
    """

    def __init__(self, rows: Sequence[Row] | None, measure: bool | None, spec: QuantSpec) -> None:
        self._rows, self._asked, self._spec = rows, measure, spec
        self._measures = spec.is_4bit and (rows is not None if measure is None else measure)
        self._is_done = False  # it has quantised, or has tried to measure
        self.keep: Path | None = None  # directory for what is quantised, from which an interrupted calibration goes on
        self.measured: Measured | None = None
        self.digest = None if rows is None else _text().digest_rows([*rows, _METHOD])

    @classmethod
    def of(cls, calibrate: bool | Sequence[Row], measure: bool | None, spec: QuantSpec) -> Calibration:
        """What arguments of `prepare_base` ask for."""
        if isinstance(calibrate, str | Mapping):
            raise ConfigConflictError(
                f"preparing a base: calibrate={calibrate!r} is no list of rows. Pass texts, conversations or token "
                "ids, of a file `qlora_rl.data.calibration.calibration_rows(file)`; or on the command line --calibrate "
                "FILE."
            )
        if calibrate is None or calibrate is False:
            return cls(None, measure, spec)
        if not spec.is_4bit:
            raise ConfigConflictError(
                f"preparing a base: quant='none' has no codes that calibrate could choose ({spec.compute_dtype}). "
                "Leave calibrate out, or use quant='nf4'."
            )
        rows = _text().shipped_text() if calibrate is True else list(calibrate)
        return cls(rows, measure, spec)

    def label(self, spec: QuantSpec) -> str:
        """Of a base of that spec, for a directory."""
        return spec.label + ("" if self._rows is None else "-calibrated")

    @property
    def is_due(self) -> bool:
        """It is to measure, and has not."""
        return bool(self._asked) and self._measures and not self._is_done

    @property
    def digests(self) -> list[str]:
        """What of it decides the base."""
        return [] if self.digest is None else [self.digest]

    @property
    def recorded(self) -> dict[str, Any]:
        """For the manifest, when the base is written."""
        found = {} if self.digest is None else {"calibrated_on": self.digest}
        return found | ({} if self.measured is None else {"measured": self.measured.as_dict()})

    def check_made(self, made: Any, what: str) -> None:
        """Reject a text for what is quantised already, unless it is the text that it was calibrated on, and measuring
        without the source.

        Args:
            made: the prepared base that it is; `None` for another 4-bit model, which is its own source.
            what: begins the error.

        Raises:
            ConfigConflictError: see above.
        """
        if self._asked and made is not None and made.spec.is_4bit and made.measured is None:
            raise ConfigConflictError(
                f"preparing a base: {what}, and measure=True does not know its source. Pass both to "
                "measure_quantisation, or leave measure out (--no-measure)."
            )
        if self.digest is not None and self.digest != getattr(made, "calibrated_on", None):
            raise ConfigConflictError(
                f"preparing a base: {what}, and its codes cannot be chosen by a text any more. Start from the 16-bit "
                "original, or leave calibrate out."
            )

    def by(
        self, tokenizer: Callable[[], Any]
    ) -> Callable[[Any, Mapping[str, torch.Tensor]], dict[str, dict[str, torch.Tensor]]]:
        """Quantises the weights of a model's blocks, with what `tokenizer` returns.

        Linears outside of the blocks are left to `quantize_linear`.
        """

        def choose(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
            if self._rows is None and not self._measures:
                return {}
            from qlora_rl.base.calibration.blocks import chooser, quantise_by_blocks

            self._is_done = True
            found: dict[str, dict[str, torch.Tensor]] = {}
            if self._rows is not None:
                made = tokenizer()
                held_out = self._held_out(made, model)
                text = _text().token_sequences(self._rows, made, model)
                again = ", going on where that was interrupted" if self.keep and self.keep.is_dir() else ""
                begin(f"choosing its codes by {sum(map(len, text))} tokens of text{again}")
                quantise = chooser(self._spec, weights, found, self.keep)
                self.measured = quantise_by_blocks(model, self._spec, weights, quantise, text, held_out)
                return found
            begin("quantising it, and measuring how far it is from its source")
            quantise = _plainly(self._spec, weights, found)
            self.try_to_measure(
                lambda: quantise_by_blocks(
                    model, self._spec, weights, quantise, held_out=self._held_out(tokenizer(), model)
                )
            )
            return found if self.measured is not None else {}

        return choose

    @staticmethod
    def check_range(model: Any, tokenizer: Callable[[], Any], dtype: str, *, is_quantized: bool) -> None:
        """`check_float16` of a model whose compute dtype that is."""
        if dtype == "float16":
            from qlora_rl.base.calibration.float16_range import check_float16

            check_float16(model, tokenizer, is_quantized=is_quantized)

    def try_to_measure(self, measure: Callable[[], Measured | None]) -> None:
        """What fails in it is logged: the base is what was asked for."""
        self._is_done = True
        try:
            self.measured = measure()
        except Exception as error:  # whatever a model finds in text
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning("how far the base is from its source was not measured (%s)", said)

    def _held_out(self, tokenizer: Any, model: Any) -> list[list[int]]:
        text = _text() if self._measures else None
        return [] if text is None else text.token_sequences(text.shipped_text(held_out=True), tokenizer, model)


def measure_stored(
    path: Path, spec: QuantSpec, model: Any, text: Sequence[Row] | None, trust_remote_code: bool
) -> Measured:
    """How far the base in a directory is from the model that it was made from; see `measure_quantisation`."""
    from qlora_rl.base.calibration.blocks import quantise_by_blocks

    stored, tokenizer = StoredTensors(path), read_tokenizer(None, path, trust_remote_code)

    def decoded(names: Sequence[str], _: Any) -> dict[str, torch.Tensor]:
        return {name: each.dequantised() for name in names if (each := stored.read_4bit(name)) is not None}

    coded = [name for name in stored if f"{name}.absmax" in stored]
    rows = _text().shipped_text(held_out=True) if text is None else text
    found = quantise_by_blocks(model, spec, coded, decoded, held_out=_text().token_sequences(rows, tokenizer, model))
    assert found is not None
    return found


def _text() -> Any:
    from qlora_rl.base.calibration import text

    return text


def _plainly(spec: QuantSpec, weights: Mapping[str, torch.Tensor], found: dict[str, dict[str, torch.Tensor]]) -> Any:
    from qlora_rl.base.calibration.blocks import decoded

    def quantise(names: Sequence[str], _: Any) -> dict[str, torch.Tensor]:
        found.update({name: quantize_linear(weights[name], spec) for name in names})
        return decoded(names, found)

    return quantise
