"""LoRA adapters on a target: put in, switched off for a while, written as a PEFT folder, merged for decoding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError

FOLDER = "target_adapter"
"""Name of the adapter's folder inside a checkpoint and inside an export."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class TargetAdapter:
    """Adapters of one rank on the linear modules of a target's upper layers.

    The model is changed in place: each chosen matrix ``W`` computes ``W·x + alpha/rank · B·A·x``, with ``B`` zero at
    the start, so that nothing changes before the first update. Everything but ``A`` and ``B`` stays frozen. The
    weights of the adapters are float32, whatever the target's.

    Args:
        target: a loaded :class:`~modelopt_eagle.target.Target` without adapters.
        rank, alpha: see above.
        target_modules: names of linear modules inside the decoder layers, such as ``["q_proj", "v_proj"]``.
        first_layer: first decoder layer that gets adapters, 0-based.
        seed: of the matrices ``A``; the global random state is left as it was.

    Raises:
        TargetError: a name that no such module has, or a first layer that does not exist.
        MissingExtraError: peft is not installed.
    """

    def __init__(
        self,
        target,
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
        first_layer: int = 0,
        seed: int = 0,
    ):
        peft = require_extra("peft", "lora")
        self.target, self.first_layer = target, first_layer
        self.module_names = find_modules(target, target_modules, first_layer)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
            **_selection(target, self.module_names, target_modules, first_layer),
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside peft
            torch.manual_seed(seed)
            self.peft_model = peft.get_peft_model(target.model, config)
        target.model.eval()
        self.config = self.peft_model.peft_config["default"]
        self.named: dict[str, nn.Parameter] = {}
        self.find_trained()

    def find_trained(self) -> None:
        """Take the matrices ``A`` and ``B`` as they are now: after others were put in their place."""
        self.named = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.peft_model.named_parameters()
            if parameter.requires_grad
        }

    def parameters(self) -> list[nn.Parameter]:
        """The matrices ``A`` and ``B``, the only trainable parameters of the model."""
        return list(self.named.values())

    @property
    def device(self) -> torch.device | None:
        """Where the adapters lie; ``None`` if on several devices."""
        devices = {parameter.device for parameter in self.parameters()}
        return devices.pop() if len(devices) == 1 else None

    def summary(self) -> dict:
        """Plain values that a head remembers its target's adapter by."""
        modules = sorted({name.rpartition(".")[2] for name in self.module_names})
        return {"rank": self.config.r, "alpha": self.config.lora_alpha, "modules": modules, "first": self.first_layer}

    def line(self) -> str:
        """What the head of a run says of it."""
        size = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"target adapters: rank {self.config.r} on {len(self.module_names)} modules of layers {self.first_layer} "
            f"to {self.target.num_layers - 1}, {size / 1e6:.2f} M parameters, trained with the head"
        )

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """While active, the target is the unadapted one."""
        with self.peft_model.disable_adapter():
            yield

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """While active, the insides of the adapted layers are not kept for the backward pass but computed again."""
        layers = self.target.layers[self.first_layer :]
        kept = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            layer.forward = _checkpointed(layer.forward)
        try:
            yield
        finally:
            for layer, before in zip(layers, kept, strict=True):
                if before is None:
                    del layer.forward
                else:
                    layer.forward = before

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take weights that :meth:`save` wrote.

        Raises:
            TargetError: they belong to other modules or another rank.
        """
        wanted = {name: tuple(parameter.shape) for name, parameter in self.named.items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wanted != found:
            names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise TargetError(
                f"the saved adapter has other matrices than this run's: {len(names)} differ, such as {names[0]} "
                f"({wanted.get(names[0], 'not there')} here, {found.get(names[0], 'not there')} in the file)"
            )
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[name])

    def save(self, folder: Path) -> None:
        """Write a folder that ``peft.PeftModel.from_pretrained(base, folder)`` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self.named.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = copy.deepcopy(self.config)
        config.inference_mode, config.base_model_name_or_path = True, self.target.name
        config.target_modules = sorted(config.target_modules)  # a set inside peft, in another order in each process
        config.save_pretrained(str(folder))


def find_modules(target, target_modules: Sequence[str], first_layer: int) -> list[str]:
    """Full names of the linear modules in the decoder layers from ``first_layer`` on that have one of the names.

    Raises:
        TargetError: the layer does not exist, or a name is no linear module's; those that are there are listed.
    """
    if not 0 <= first_layer < target.num_layers:
        raise TargetError(
            f"target_lora.first_layer is {first_layer}; {target.name} has layers 0 to {target.num_layers - 1}"
        )
    prefix, found, seen = target.parts.names["layers"], [], set()
    for index in range(first_layer, target.num_layers):
        for name, module in target.layers[index].named_modules():
            if isinstance(module, nn.Linear):
                last = name.rpartition(".")[2]
                seen.add(last)
                if last in target_modules:
                    found.append(f"{prefix}.{index}.{name}")
    missing = [name for name in target_modules if name not in seen]
    if missing:
        raise TargetError(
            f"target_lora.target_modules: no linear module {', '.join(missing)} in layers {first_layer} to "
            f"{target.num_layers - 1} of {target.name}; there are {', '.join(sorted(seen)) or 'none'}"
        )
    return found


def _selection(target, names: list[str], target_modules: Sequence[str], first_layer: int) -> dict:
    """The choice of modules as PEFT writes it: by short names where no module elsewhere has one of them."""
    matching = [name for name, _ in target.model.named_modules() if name.rpartition(".")[2] in target_modules]
    lower = [f"{target.parts.names['layers']}.{index}." for index in range(first_layer)]
    elsewhere = [name for name in set(matching) - set(names) if not name.startswith(tuple(lower))]
    if elsewhere:  # such as the layers of a vision tower
        return {"target_modules": names}
    if first_layer == 0:
        return {"target_modules": list(target_modules)}
    return {
        "target_modules": list(target_modules),
        "layers_to_transform": list(range(first_layer, target.num_layers)),
        "layers_pattern": target.parts.names["layers"].rpartition(".")[2],
    }


def _checkpointed(forward):
    def run(*arguments, **options):
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def find_adapter(path: str | Path) -> Path:
    """The PEFT folder that is meant: the folder itself, or the one inside an export, a checkpoint or a run.

    Raises:
        TargetError: none is there.
    """
    path = Path(path)
    for folder in (path, path / FOLDER, path / "export" / FOLDER, path / "best" / FOLDER):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            return folder
    raise TargetError(
        f"{path}: expected a PEFT folder with {CONFIG} and {WEIGHTS}, or an export or run that holds one as {FOLDER}; "
        "found none"
    )


def read_adapter(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """``(config, tensors)`` of a PEFT folder.

    Raises:
        TargetError: a file that is cut short, or an adapter that is not LoRA.
    """
    try:
        config = parse_json((folder / CONFIG).read_bytes(), finite=False)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise TargetError(f"{folder}: the adapter cannot be read: {error}") from error
    if config.get("peft_type") != "LORA" or not tensors:
        raise TargetError(f"{folder}: expected a LoRA adapter with weights, found {config.get('peft_type')!r}")
    return config, tensors


def attach(model: nn.Module, folder: Path):
    """``peft.PeftModel`` of a model and a PEFT folder, after checking that every tensor of the file is in it.

    Raises:
        TargetError: the adapter is for other modules or other sizes.
    """
    peft = require_extra("peft", "lora")
    _, tensors = read_adapter(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is named below
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except (ValueError, RuntimeError) as error:
        raise TargetError(f"{folder} does not fit {type(model).__name__}: {first_line(error)}") from error
    inside = {
        name.replace(".default.", "."): parameter
        for name, parameter in adapted.named_parameters()
        if ".default." in name
    }
    for name in sorted(tensors.keys() | inside.keys()):
        if name not in inside or name not in tensors:
            place = "in the model and not in the file" if name in inside else "in the file and not in the model"
            raise TargetError(f"{folder} is an adapter for another model: {name} is {place}")
        if not torch.equal(inside[name].detach().cpu().float(), tensors[name].float()):
            raise TargetError(f"{folder}: {name} reads back differently")
    return adapted


def merge_adapter(target, path: str | Path) -> Path:
    """Add an adapter to the weights of a loaded target, for decoding at full speed; returns the PEFT folder used.

    Raises:
        TargetError: no adapter, one for another model, or one that changes more than the decoder layers.
    """
    folder = find_adapter(path)
    layers = f"base_model.model.{target.parts.names['layers']}."
    outside = [name for name in read_adapter(folder)[1] if not name.startswith(layers)]
    if outside:
        raise TargetError(
            f"{folder} changes {outside[0]}, which is no part of the decoder layers {target.parts.names['layers']} of "
            f"{target.name}: merge it into the model yourself and give the merged folder as the target"
        )
    attach(target.model, folder).merge_and_unload()
    target.model.eval().requires_grad_(False)
    return folder


def check_adapter(folder: Path, name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> int:
    """Read a PEFT folder back through ``peft.PeftModel`` over the target's empty shell; the weights are not loaded.

    Args:
        folder: the PEFT folder.
        name, revision, trust_remote_code: of the target, as for ``load_target``.

    Returns:
        how many tensors were compared.

    Raises:
        TargetError: a tensor that has no place in the target, or reads back differently.
    """
    from modelopt_eagle.target.load import causal_class, load_config, resolve

    config = load_config(resolve(name), revision, trust_remote_code)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = causal_class(config, name, trust_remote_code).from_config(config, trust_remote_code=trust_remote_code)
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)  # any shape, one number in memory
            setattr(module, own, nn.Parameter(empty, requires_grad=False))
    attach(model, folder)
    return len(read_adapter(folder)[1])
