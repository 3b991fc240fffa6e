"""Dump a target's hidden states with TensorRT-LLM (needs its GPU environment)."""

from __future__ import annotations

from modelopt_eagle.cli._dump import build_parser, parse_layers, run


def open_back_end(args):
    """Prepare the engine; norm and head are read from the target's files."""
    from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
    from modelopt_eagle.features.dump import EngineBackEnd
    from modelopt_eagle.features.engines.tensorrt_llm import TrtllmFeatures
    from modelopt_eagle.recipe.command_line import table_arguments
    from modelopt_eagle.target import load_target_tables

    tables = load_target_tables(**table_arguments(args, args.model))
    layers = tables.config.num_hidden_layers
    ids = check_layer_ids(parse_layers(args.aux_layers) or default_layer_ids(layers), layers)
    options = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    given = {name: value for name, value in options.items() if value is not None}
    engine = TrtllmFeatures(args.model, ids, args.tensor_parallel, given)
    return EngineBackEnd(tables, ids, engine.states, final_is_normed=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = build_parser(__doc__, "dump-tensorrt-llm")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the target (default 1)")
    return run(parser, open_back_end, argv)
