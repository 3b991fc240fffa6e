"""Dump a target's hidden states with a vLLM engine in this process (run it by the Python that has vLLM)."""

from __future__ import annotations

from modelopt_eagle.cli._dump import build_parser, parse_layers, run


def open_back_end(args):
    """Start the engine; norm and head are read from the target's files."""
    from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
    from modelopt_eagle.features.dump import EngineBackEnd
    from modelopt_eagle.features.engines.vllm import VllmFeatures, context_length
    from modelopt_eagle.recipe.command_line import table_arguments
    from modelopt_eagle.target import load_target_tables
    from modelopt_eagle.target.load import resolve

    tables = load_target_tables(**table_arguments(args, args.model))
    layers = tables.config.num_hidden_layers
    ids = check_layer_ids(parse_layers(args.aux_layers) or default_layer_ids(layers), layers)
    options = {"trust_remote_code": bool(args.trust_remote_code)}
    if args.gpu_memory is not None:
        options["gpu_memory_utilization"] = args.gpu_memory
    engine = None

    def states(rows):
        nonlocal engine
        if engine is None:  # only when there is a row to make
            engine = VllmFeatures(
                str(resolve(args.model)),
                ids,
                layers,
                dtype=args.target_dtype,
                context=context_length(tables.config, args.max_length),
                batch_tokens=args.batch_tokens,
                revision=args.revision,
                tensor_parallel_size=args.tensor_parallel,
                options=options,
            )
        for number, message in engine.states(rows):
            yield number, message.states[:, :-1].flatten(1), message.states[:, -1]

    return EngineBackEnd(tables, ids, states, final_is_normed=False)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = build_parser(__doc__, "dump-vllm")
    parser.add_argument(
        "--target-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="numbers that vLLM runs the target in; auto: float32 on a CPU, else its checkpoint's",
    )  # fmt: skip
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the target (default 1)")
    parser.add_argument("--gpu-memory", type=float, help="share of a device's memory for vLLM")
    return run(parser, open_back_end, argv)
