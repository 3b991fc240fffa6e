"""Serve a target's features to trainers: by ``vllm serve`` with our connector, or by transformers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from modelopt_eagle.common.console import say
from modelopt_eagle.common.lists import parse_ids
from modelopt_eagle.common.package import search_path
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.mailbox import check_bind, check_free
from modelopt_eagle.recipe.command_line import add_target_options, target_arguments

TOKEN_VARIABLE = "MODELOPT_EAGLE_STREAM_TOKEN"


def build_parser() -> CommandParser:
    """The command line."""
    parser = command_parser(
        "serve-features",
        __doc__,
        example="modelopt-eagle serve-features --model NAME --port 8000",
        epilog=f"Off loopback a token is required: set {TOKEN_VARIABLE} to the same secret for servers and trainer. "
        "Options behind -- go to vllm serve as they are.",
    )
    parser.add_argument("--model", required=True, help="target: hub id, local folder, GGUF file, or quickstart")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"), help="default vllm")
    parser.add_argument("--aux-layers", metavar="a,b,c", help="layers by outputs, 0-based (default 1, n//2-1, n-4)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port, of the url for trainers (default 8000)")
    parser.add_argument(
        "--feature-port", type=int, default=5557, help="port that states are fetched from (default 5557)"
    )
    parser.add_argument("--max-length", type=int, default=4096, help="longest row in tokens (default 4096)")
    parser.add_argument("--max-gib", type=float, default=4.0, help="memory for states not fetched yet (default 4 GiB)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="vllm engine: devices that share the target")
    parser.add_argument("--engine-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--print", action="store_true", help="print vLLM's command instead of running it")
    parser.add_argument("engine_options", nargs="*", metavar="-- OPTION", help="further options of vllm serve")
    add_target_options(parser, template=False)  # the trainer renders
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; it ends when the server does.

    Returns:
        the exit code.
    """
    args = build_parser().parse_args(argv)
    args.host = args.host.strip("[]")
    _check(args)
    token = os.environ.get(TOKEN_VARIABLE)
    check_bind(_address(args.host, args.port), token)
    return _serve_vllm(args, token) if args.engine == "vllm" else _serve_target(args, token)


def _address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense, and options of the other engine.

    Raises:
        StreamError: names the option.
    """
    for name in ("port", "feature_port"):
        if not 0 < getattr(args, name) < 65536:
            raise StreamError(f"--{name.replace('_', '-')} takes a port, 1 to 65535; found {getattr(args, name)}")
    if args.port == args.feature_port:
        raise StreamError(f"--port and --feature-port must be two ports; found {args.port} for both")
    if args.engine == "vllm" and (args.device != "auto" or args.attn_implementation is not None):
        raise StreamError(
            "--device and --attn-implementation are of the hf engine: leave them out, or give vllm serve's behind --"
        )
    for name in ("max_length", "max_gib", "tensor_parallel"):
        if getattr(args, name) <= 0:
            raise StreamError(f"--{name.replace('_', '-')} must be above 0; found {getattr(args, name)}")


def vllm_command(args: argparse.Namespace) -> list[str]:
    """The command line of ``vllm serve`` that hands out the layers asked for."""
    from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
    from modelopt_eagle.features.engines.vllm import context_length, speculative_config, transfer_config
    from modelopt_eagle.target.load import load_config, resolve

    place, own_code = resolve(args.model), args.trust_remote_code or "--trust-remote-code" in args.engine_options
    config = load_config(place, args.revision, own_code).get_text_config()
    layers = config.num_hidden_layers
    ids = check_layer_ids(_layers(args) or default_layer_ids(layers), layers)
    transfer = transfer_config(_address(args.host, args.feature_port), int(args.max_gib * 2**30))
    command = [args.engine_python, "-m", "modelopt_eagle.features.engines.vllm_serve", str(place)]
    command += ["--host", args.host, "--port", str(args.port), "--dtype", args.target_dtype]
    command += ["--max-model-len", str(context_length(config, args.max_length))]
    command += ["--tensor-parallel-size", str(args.tensor_parallel)]
    command += ["--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"]
    command += ["--speculative-config", json.dumps(speculative_config(ids, layers))]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    if args.revision:
        command += ["--revision", args.revision]
    if args.trust_remote_code and "--trust-remote-code" not in args.engine_options:
        command += ["--trust-remote-code"]
    return command + args.engine_options


def _layers(args) -> tuple[int, ...] | None:
    ids = parse_ids(args.aux_layers, "--aux-layers", StreamError)
    return None if ids is None else tuple(sorted(ids))


_NEEDED = ("vllm", "torch", "transformers", "safetensors", "yaml", "pydantic", "zmq")
"""What the engine's Python must have: vLLM, and what our connector imports."""


def _serve_vllm(args, token: str | None) -> int:
    from modelopt_eagle.serving.engine_server import engine_environment
    from modelopt_eagle.target.hashes import cache_folder

    command = vllm_command(args)
    package = str(search_path(cache_folder()))  # vLLM's Python must find our connector
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    if args.print:
        print(f"PYTHONPATH={shlex.quote(path)} {shlex.join(command)}")
        return 0
    _check_ports(args)
    _check_python(args.engine_python)
    environment = engine_environment(Path(args.engine_python)) | {"PYTHONPATH": path}
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        del environment["VLLM_LOGGING_LEVEL"]  # a server says what it does
    if token:
        environment["VLLM_API_KEY"] = token
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def _check_python(python: str) -> None:
    """Ask an interpreter for the packages that serving needs, without loading them.

    Raises:
        StreamError: it cannot be started, or lacks some.
    """
    ask = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if not u.find_spec(n)])"
    remedy = "--engine-python names the Python that has vLLM (`bash scripts/setup_vllm_cpu.sh` makes one for CPUs)"
    try:
        done = subprocess.run([python, "-c", ask, *_NEEDED], capture_output=True, text=True, check=False)
    except OSError as error:
        raise StreamError(f"cannot start {python}: {error}; {remedy}") from error
    if done.returncode:
        raise StreamError(f"{python} does not run as a Python: {done.stderr.strip()[-300:]}; {remedy}")
    if (missing := done.stdout.strip()) != "[]":
        raise StreamError(f"{python} lacks {missing.strip('[]')}; {remedy}")


def _check_ports(args) -> None:
    check_free(_address(args.host, args.port), "--port")
    check_free(_address(args.host, args.feature_port), "--feature-port")


def _serve_target(args, token: str | None) -> int:
    from modelopt_eagle.features.stream.target_server import TargetServer
    from modelopt_eagle.target import load_target

    if args.print or args.engine_options or args.tensor_parallel != 1:
        raise StreamError(
            "--print, --tensor-parallel and options behind -- are of the vllm engine; leave them out with hf"
        )
    _check_ports(args)
    target = load_target(**target_arguments(args, args.model))
    server = TargetServer(
        target,
        _layers(args),
        address=_address(args.host, args.port),
        feature_address=_address(args.host, args.feature_port),
        token=token,
        max_length=args.max_length,
        max_bytes=int(args.max_gib * 2**30),
    )
    if server.max_length < args.max_length:
        say(f"rows of up to {server.max_length} tokens are taken: the target knows no more positions")
    print(f"serving features of {target.name} on {server.url}", flush=True)
    try:
        server.serve_forever()
    finally:
        server.close()
    return 0
