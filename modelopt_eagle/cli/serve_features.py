"""Serve a target's features to trainers: by ``vllm serve`` with our connector, or by transformers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.mailbox import check_bind

TOKEN_VARIABLE = "MODELOPT_EAGLE_STREAM_TOKEN"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modelopt-eagle serve-features",
        description=__doc__,
        epilog=f"Off loopback a token is required: set {TOKEN_VARIABLE} to the same secret for servers and trainer. "
        "Options behind -- go to vllm serve as they are.",
    )
    parser.add_argument(
        "--model", required=True, help="target: hub id or local folder (hf engine: also GGUF, quickstart)"
    )
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"), help="default vllm")
    parser.add_argument("--aux-layers", metavar="a,b,c", help="layers by outputs, 0-based (default 1, n//2-1, n-4)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port, for --streaming urls (default 8000)")
    parser.add_argument(
        "--feature-port", type=int, default=5557, help="port that states are fetched from (default 5557)"
    )
    parser.add_argument("--max-length", type=int, default=4096, help="longest row in tokens (default 4096)")
    parser.add_argument("--max-gib", type=float, default=4.0, help="memory for states not fetched yet (default 4 GiB)")
    parser.add_argument("--dtype", default="auto", help="dtype of the target (default auto)")
    parser.add_argument("--device", default="auto", help="hf engine: where the target runs (default auto)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="vllm engine: devices that share the target")
    parser.add_argument("--engine-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--print", action="store_true", help="print vLLM's command instead of running it")
    parser.add_argument("engine_options", nargs="*", metavar="-- OPTION", help="further options of vllm serve")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; it ends when the server does."""
    args = build_parser().parse_args(argv)
    token = os.environ.get(TOKEN_VARIABLE)
    check_bind(f"{args.host}:{args.port}", token)
    return _serve_vllm(args, token) if args.engine == "vllm" else _serve_target(args, token)


def vllm_command(args: argparse.Namespace) -> list[str]:
    """The command line of ``vllm serve`` that hands out the layers asked for."""
    from modelopt_eagle.features.vllm_engine import speculative_config, transfer_config
    from modelopt_eagle.target import check_layer_ids, default_layer_ids
    from modelopt_eagle.target.load import load_config, resolve

    place = resolve(args.model)
    layers = load_config(place, args.revision).get_text_config().num_hidden_layers
    ids = check_layer_ids(_layers(args) or default_layer_ids(layers), layers)
    transfer = transfer_config(f"{args.host}:{args.feature_port}", int(args.max_gib * 2**30))
    command = [args.engine_python, "-m", "modelopt_eagle.features.vllm_serve", str(place)]
    command += ["--host", args.host, "--port", str(args.port), "--dtype", args.dtype]
    command += ["--max-model-len", str(args.max_length + 2), "--tensor-parallel-size", str(args.tensor_parallel)]
    command += ["--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"]
    command += ["--speculative-config", json.dumps(speculative_config(ids, layers))]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    if args.revision:
        command += ["--revision", args.revision]
    return command + args.engine_options


def _layers(args) -> tuple[int, ...] | None:
    try:
        return None if args.aux_layers is None else tuple(sorted(int(part) for part in args.aux_layers.split(",")))
    except ValueError as error:
        raise StreamError(f"--aux-layers takes numbers such as 1,14,26; found {args.aux_layers!r}") from error


def _serve_vllm(args, token: str | None) -> int:
    command = vllm_command(args)
    if args.print:
        print(shlex.join(command))
        return 0
    package = str(Path(__file__).parents[2])  # vLLM's Python must find our connector
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    if token:
        environment["VLLM_API_KEY"] = token
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise StreamError(
            f"cannot start {command[0]}: {error}; --engine-python names the Python that has vLLM"
        ) from error


def _serve_target(args, token: str | None) -> int:
    import torch

    from modelopt_eagle.features.stream.target_server import TargetServer
    from modelopt_eagle.target import load_target

    if args.print or args.engine_options or args.tensor_parallel != 1:
        raise StreamError(
            "--print, --tensor-parallel and options behind -- are of the vllm engine; leave them out with hf"
        )
    on_cpu = args.device == "cpu" or (args.device == "auto" and not torch.accelerator.is_available())
    dtype = "float32" if args.dtype == "auto" and on_cpu else args.dtype
    target = load_target(args.model, dtype=dtype, device="cpu" if on_cpu else args.device, revision=args.revision)
    server = TargetServer(
        target,
        _layers(args),
        address=f"{args.host}:{args.port}",
        feature_address=f"{args.host}:{args.feature_port}",
        token=token,
        max_length=args.max_length,
        max_bytes=int(args.max_gib * 2**30),
    )
    print(f"serving features of {target.name} on {server.url}", flush=True)
    server.serve_forever()
    return 0
