"""Post-training quantisation of a head: calibrated by nvidia-modelopt, packed for engines, judged by acceptance."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.common.dtypes import parse_dtype
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.eagle3.rollout import rollout
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.card import model_card
from modelopt_eagle.export.compare import rebuilt
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.check import engine_notes
from modelopt_eagle.export.engines.quantisation import FUSED, quant_reasons
from modelopt_eagle.export.engines.versions import needed_version
from modelopt_eagle.export.fitting import table_of, target_identity, with_target, without_copy
from modelopt_eagle.export.folders import whole_folder
from modelopt_eagle.export.quant_formats import BLOCK, FORMATS, QuantizedLinear, engine_config, pack, unpack
from modelopt_eagle.export.tensors import read_json, read_tensors
from modelopt_eagle.export.universal import file_tensors, universal_config
from modelopt_eagle.export.write import write_folder

EXCLUDED = ["lm_head"]
"""Modules that stay as they are. Engines match these as parts of names, so anything longer would hide layers."""
MODELOPT_CONFIGS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG", "int8": "INT8_DEFAULT_CFG"}


@dataclass
class QuantizationReport:
    """Size and acceptance before and after.

    Attributes:
        bytes_before, bytes_after: of the tensors.
        acceptance_before, acceptance_after: mean acceptance lengths; ``None`` if not measured.
        drop: relative loss, ``(before - after) / before``.
        layers: number of quantised linear layers.
        notes: engines that would not serve it as trained.
        needs: the oldest release of each engine that reads all of it.
    """

    path: Path
    form: str
    bytes_before: int
    bytes_after: int
    layers: int
    acceptance_before: float | None = None
    acceptance_after: float | None = None
    notes: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    @property
    def drop(self) -> float | None:
        """Relative loss of acceptance length."""
        if self.acceptance_before is None or self.acceptance_after is None:
            return None
        return (self.acceptance_before - self.acceptance_after) / self.acceptance_before


def calibrate(module: EagleModule, form: str, run: Callable[[EagleModule], None]) -> dict[str, tuple[float, float]]:
    """Largest magnitudes in every linear layer, by nvidia-modelopt's calibration.

    Args:
        run: feeds a head with the calibration data.

    Returns:
        Layer name to ``(input, weight)``; layers that an engine fuses share the larger weight.

    Raises:
        ExportError: unknown format, a width that the format cannot block, or a layer that the data never reached.
        MissingExtraError: nvidia-modelopt is not installed.
    """
    if form not in FORMATS:
        raise ExportError(f"format {form!r} is unknown; known are {', '.join(FORMATS)}")
    quantization = require_extra("modelopt.torch.quantization", "quantize")
    narrow = [n for n, m in linears(module).items() if form == "nvfp4" and m.in_features % BLOCK]
    if narrow:
        raise ExportError(
            f"nvfp4 scales blocks of {BLOCK} inputs; {narrow[0]} has {linears(module)[narrow[0]].in_features}"
        )
    with torch.no_grad():
        work = quantization.quantize(copy.deepcopy(module).float(), getattr(quantization, MODELOPT_CONFIGS[form]), run)
    found: dict[str, list[float]] = {}
    for name, layer in linears(work).items():
        amax = layer.input_quantizer.amax
        if amax is None or not float(amax.max()) > 0:
            raise ExportError(f"the calibration data never reached {name}: give rows with assistant text")
        found[name] = [float(amax.max()), float(linears(module)[name].weight.detach().abs().max())]
    for name in found:
        prefix, last = name.rpartition(".")[::2]
        for _, group in FUSED:
            members = [f"{prefix}.{other}" for other in group if f"{prefix}.{other}" in found]
            if last in group and len(members) > 1:
                for index in range(2):
                    largest = max(found[member][index] for member in members)
                    for member in members:
                        found[member][index] = largest
    return {name: (a, w) for name, (a, w) in found.items()}


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are quantised, by name."""
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    return {n: m for n, m in layers.items() if not any(part in n for part in EXCLUDED)}


def quantized_module(
    module: EagleModule, ranges: dict[str, tuple[float, float]], form: str
) -> tuple[EagleModule, dict[str, dict[str, Tensor]]]:
    """A copy that computes with packed numbers, and those numbers by layer."""
    work, packed = copy.deepcopy(module).float(), {}
    for name, layer in linears(work).items():
        packed[name] = pack(layer.weight, *ranges[name], form)
        parent, _, child = name.rpartition(".")
        setattr(work.get_submodule(parent) if parent else work, child, QuantizedLinear(packed[name], layer.bias, form))
    return work.eval(), packed


def feed(batches: Iterable[Any], embed: Callable[[Tensor], Tensor], steps: int) -> Callable[[EagleModule], None]:
    """A calibration run over feature batches: the training rollout, so that every step's inputs are seen.

    Args:
        batches: ``FeatureBatch`` objects.
        embed: target embeddings of token ids, ``[1, N] -> [1, N, H]``.
        steps: K.
    """
    held = list(batches)

    def run(module: EagleModule) -> None:
        for batch in held:
            ids = batch.input_ids  # [1,N]
            embeddings = module.embed(ids, embed)  # [1,N,H]
            rollout(module, embeddings, batch.aux_hidden.float(), steps=steps, document_ids=batch.document_ids)

    return run


def quantized_tensors(
    module: EagleModule, packed: dict[str, dict[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors of the folder, under the names that engines read."""
    tensors = file_tensors(module, dtype)
    midlayer = any(name.startswith("midlayer.") for name in tensors)
    for name, parts in packed.items():
        name = re.sub(r"^layers\.0\.", "midlayer.", name) if midlayer else name
        for part, tensor in parts.items():
            tensors[f"{name}.{part}"] = tensor.contiguous()
    return tensors


def check_written(
    folder: Path, packed: dict[str, dict[str, Tensor]], tensors: dict[str, Tensor], form: str, config: DraftConfig
) -> None:
    """Read the folder back: every tensor equal, and every layer quantised that vLLM's rules take for quantised.

    Raises:
        ExportError: a difference.
    """
    read = read_tensors(folder)
    differing = [n for n, t in tensors.items() if n not in read or not torch.equal(read[n].view(-1), t.view(-1))]
    if differing or set(read) != set(tensors):
        raise ExportError(f"the quantised folder reads back differently: {', '.join(differing[:4])}")
    for name, parts in packed.items():
        if not bool(torch.isfinite(unpack(parts, form)).all()):
            raise ExportError(f"{name} holds numbers that are not finite after quantisation")
    data, legacy = read_json(folder / "config.json"), read_json(folder / "hf_quant_config.json")
    reasons = quant_reasons(data, legacy, read, config, ENGINES["vllm"].quantised)
    if reasons:
        raise ExportError("an engine would read the quantised folder wrongly: it " + "; it ".join(reasons))


def check_quantisable(module: DraftModule) -> None:
    """Refuse heads that the rollout of :func:`feed` would calibrate on numbers which they never meet.

    Raises:
        ExportError: a head of another drafter than EAGLE-3.
    """
    algorithm = algorithm_of(module.config)
    if algorithm.name != "eagle3":
        raise ExportError(
            f"heads of {algorithm.title} are not quantised here: calibration runs the steps of an EAGLE-3 rollout; "
            "export the head as it is"
        )


def quantize_drafter(
    module: EagleModule,
    path: str | Path,
    form: str,
    run: Callable[[EagleModule], None],
    *,
    measure: Callable[[EagleModule], float | dict[str, Any]] | None = None,
    max_drop: float = 0.02,
    target=None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    adapter: str | Path | None = None,
) -> QuantizationReport:
    """Quantise a head and export it, unless it lost too much.

    Args:
        module: the trained head.
        path: the folder to make.
        form: ``fp8``, ``nvfp4`` or ``int8``.
        run: calibration, see :func:`feed`.
        measure: acceptance length of a head, or the content of its ``acceptance.json``; called before and after.
        max_drop: largest relative loss that is still exported.
        target: as in ``export_checkpoint``.
        dtype: of the tensors that stay unquantised; ``None`` keeps theirs.
        adapter: as in ``export_checkpoint``.

    Returns:
        what was written, with the acceptance before and after where it was measured.

    Raises:
        ExportError: the head lost more than ``max_drop``, or is of another drafter than EAGLE-3; or see
            :func:`calibrate`.
    """
    check_quantisable(module)
    module = without_copy(rebuilt(module, with_target(module.config, target)), table_of(target))
    config = module.config
    dtype = parse_dtype(dtype) or module.fc.weight.dtype
    ranges = calibrate(module, form, run)
    after_module, packed = quantized_module(module, ranges, form)
    tensors = quantized_tensors(module, packed, dtype)
    measured = [measure(module.float()), measure(after_module)] if measure else [None, None]
    found = measured[1] if isinstance(measured[1], dict) else {}
    before, after = (m["acceptance_length"] if isinstance(m, dict) else m for m in measured)
    report = QuantizationReport(
        Path(path), form, size_of(file_tensors(module, dtype)), size_of(tensors), len(packed), before, after
    )
    if report.drop is not None and report.drop > max_drop:
        raise ExportError(
            f"{form} lowers the acceptance length from {before:.3f} to {after:.3f} ({report.drop:.1%}), more than "
            f"--max_drop {max_drop:.1%}: nothing was exported"
        )
    producer = {"name": "modelopt", "version": str(require_extra("modelopt", "quantize").__version__)}
    legacy, for_config = engine_config(form, EXCLUDED, producer)
    data = {**universal_config(config, dtype), "quantization_config": for_config}
    notes = [f"quantised to {form} by nvidia-modelopt {producer['version']}; {', '.join(EXCLUDED)} left as it was"]
    if before is not None:
        notes.append(f"acceptance length {before:.3f} before, {after:.3f} after")
    report.notes = engine_notes(data, tensors, config, legacy, target_identity(target).get("num_layers"))
    report.needs = [needed_version(name, config, quantised=True).text(name) for name in ENGINES]
    card = model_card(config, data, report=found, notes=notes + report.notes)
    with whole_folder(path, overwrite) as folder:
        files = {"config.json": data, "hf_quant_config.json": legacy, "README.md": card}
        write_folder(folder, tensors, files, adapter)
        check_written(folder, packed, tensors, form, config)
    return report


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
