"""Export a trained head as one folder that vLLM, SGLang and TensorRT-LLM load (`scripts/export_hf_checkpoint.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import ExportError


def build_parser() -> CommandParser:
    """The options."""
    from modelopt_eagle.cli._reading import add_reading_options
    from modelopt_eagle.recipe.command_line import add_target_options

    parser = command_parser(
        "export-hf-checkpoint",
        __doc__,
        example="modelopt-eagle export-hf-checkpoint --model_path ckpts/quickstart-eagle3 --export_path head",
    )
    parser.add_argument(
        "--model_path", required=True, type=Path, help="a training checkpoint, a run's output folder, or any head"
    )
    parser.add_argument(
        "--export_path", required=True, type=Path, help="folder to make; it appears whole or not at all"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the exported numbers; default: as they are"
    )
    parser.add_argument(
        "--layer-names",
        "--layer_names",
        choices=("midlayer", "layers"),
        default="midlayer",
        help="names in a one-layer head; midlayer (default) is read by all three engines",
    )
    parser.add_argument(
        "--rope-scaling",
        "--rope_scaling",
        help='a scaling to declare for long contexts, JSON, such as \'{"rope_type": "yarn", "factor": 4.0}\'',
    )
    parser.add_argument(
        "--base_model", "--base-model", help="check the head against this target and complete its config from it"
    )
    parser.add_argument(
        "--report", type=Path, help="acceptance.json for the model card; default: beside the checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export, whole")
    parser.add_argument(
        "--for-engine",
        "--for_engine",
        action="append",
        metavar="ENGINE=VERSION",
        help="the engine that will serve it, such as vllm=0.22.0 (sglang, tensorrt_llm; may be given several times): "
        "a version that does not read all of the head is refused",
    )
    parser.add_argument(
        "--tensor-parallel",
        "--tensor_parallel",
        type=int,
        metavar="N",
        help="size it will be served with: one that does not divide the head is refused, a reduced vocabulary padded",
    )
    parser.add_argument("--push_to_hub", metavar="OWNER/NAME", help="upload the folder to the hub afterwards")
    add_reading_options(parser, base_model=False)
    add_target_options(parser, weights=False, template=False)
    return parser


def parse_rope_scaling(text: str | None) -> dict | None:
    """The option's JSON.

    Raises:
        ExportError: not JSON, no object, or without a rope type.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ExportError(f"--rope-scaling is not JSON: {error}") from error
    if not isinstance(value, dict) or "rope_type" not in value:
        raise ExportError(f'--rope-scaling must be an object with "rope_type", found {text}')
    return value


def find_report(model_path: Path, folder: Path, given: Path | None) -> dict:
    """``acceptance.json`` as given, or from the run the checkpoint lies in; empty if there is none.

    Raises:
        ExportError: a given file that is missing or no JSON.
    """
    places = [given] if given else [root / "report" / "acceptance.json" for root in (model_path, folder, folder.parent)]
    for place in places:
        if place.is_file():
            try:
                return json.loads(place.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ExportError(f"{place} is not JSON: {error}") from error
    if given:
        raise ExportError(f"{given} is missing; ar_validate.py writes it")
    return {}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from modelopt_eagle.cli._reading import reading_options
    from modelopt_eagle.export import export_checkpoint, read_head
    from modelopt_eagle.export.card import licence_of
    from modelopt_eagle.export.engines.versions import parse_versions

    rope_scaling = parse_rope_scaling(arguments.rope_scaling)
    options, target = reading_options(arguments)
    head = read_head(arguments.model_path, options=options)
    report = export_checkpoint(
        head.module,
        head.config,
        arguments.export_path,
        target=target,
        dtype=arguments.dtype,
        layer_names=arguments.layer_names,
        rope_scaling=rope_scaling,
        overwrite=arguments.overwrite,
        for_engines=parse_versions(arguments.for_engine),
        report={
            "target_license": licence_of(arguments.base_model or head.config.target_name),
            **find_report(arguments.model_path, head.folder, arguments.report),
        },
        adapter=head.adapter,
        tensor_parallel=arguments.tensor_parallel,
    )
    print(f"read      {head.folder} ({head.layout})")
    print(f"exported  {report.path}: {report.tensors} tensors, {report.dtype}, {report.bytes / 1e6:.1f} MB")
    print(f"compared  every tensor equal, logits of one forward pass within {report.logits_difference:.1e}")
    for need in report.needs:
        print(f"needs     {need}")
    for note in report.notes:
        print(f"note      {note}")
    if arguments.push_to_hub:
        from modelopt_eagle.export.hub import push_to_hub

        print(f"uploaded  {push_to_hub(report.path, arguments.push_to_hub)}")
    return 0
