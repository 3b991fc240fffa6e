"""Dump a target's hidden states with TensorRT-LLM (needs its GPU environment)."""

import sys

from command_line import build_parser, parse_layers, run


def open_back_end(args):
    """Prepare the engine; norm and head are read from the target's files."""
    from modelopt_eagle.features.dump import EngineBackEnd
    from modelopt_eagle.features.engines.tensorrt_llm import TrtllmFeatures
    from modelopt_eagle.target import check_layer_ids, default_layer_ids, load_target_tables

    tables = load_target_tables(
        args.model,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        chat_template=args.chat_template,
    )
    layers = tables.config.num_hidden_layers
    ids = check_layer_ids(parse_layers(args.aux_layers) or default_layer_ids(layers), layers)
    engine = TrtllmFeatures(args.model, ids, args.tensor_parallel)
    return EngineBackEnd(tables, ids, engine.states, final_is_normed=True)


if __name__ == "__main__":
    parser = build_parser(__doc__)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the target (default 1)")
    sys.exit(run(parser, open_back_end))
