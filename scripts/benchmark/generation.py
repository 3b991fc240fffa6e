"""Plain greedy decoding with a cache, chains and trees on one target in one run: speed-up, and what eats the rest.

    python scripts/benchmark/generation.py --model_path export

Prints a row a draft shape: acceptance length, speed-up over plain decoding (wall clock, prefill included, one request
at a time), its share of the acceptance length, a step's cost in plain steps, split into draft, verification and the
rest, and where the missing share goes. Without ``--model_path`` a random head of the usual size is used: the costs are
real, the acceptance is not.

    python scripts/benchmark/generation.py --contexts 128 1024 4096 8000

Prints what passes of 1, 4 and 9 nodes cost behind so many tokens instead, beside transformers' own step of one token
(nothing lent to its layers). With one thread (OMP_NUM_THREADS=1) on a CPU it is processor time, which other work on
the machine hardly changes. ``--attention own`` leaves the target its own. With ``--model_path`` it also decodes prompts
of so many tokens, the shipped chats one after the other, and prints acceptance, speed-up and its share by context.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from contextlib import ExitStack
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="quickstart", help="hub id, folder, GGUF file or quickstart (default)")
    parser.add_argument("--model_path", help="the head; without one a random head with 8192 draft tokens")
    parser.add_argument("--prompts", default="quickstart", help="JSONL of prompts (default: the shipped ones)")
    parser.add_argument("--num_prompts", type=int, default=8, help="prompts timed, one at a time (default 8)")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="limit of an answer (default 96)")
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 2, 3, 5], help="chain lengths (default 1 2 3 5)")
    parser.add_argument(
        "--trees", nargs="*", default=["4,3,9"], help="tree shapes topk,depth,num_nodes (default 4,3,9)"
    )
    parser.add_argument(
        "--fast_linear",
        choices=("auto", "on", "off"),
        default="auto",
        help="oneDNN's linear layers on the CPU, for plain decoding and drafts alike (default auto; off: nn.Linear's)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        help="time passes of the target behind so many tokens, in place of generation",
    )
    parser.add_argument(
        "--attention", choices=("grouped", "own"), default="grouped", help="of these passes: ours (default), or its own"
    )
    parser.add_argument("--repeats", type=int, default=9, help="passes of each size, of which the best counts (9)")
    parser.add_argument("--output", type=Path, help="write the rows as JSON here")
    return parser


def main() -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_args()
    import torch
    import transformers

    from modelopt_eagle.common.package import package_commit
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.decoding import PseudoSpeculativeGenerator
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target import load_target
    from modelopt_eagle.validation.measure import time_generators
    from modelopt_eagle.validation.report import format_table, same_text

    target = load_target(arguments.target)
    if arguments.contexts:
        by_context(target, arguments)
        if arguments.model_path is None:
            return
    head = random_head(target) if arguments.model_path is None else load_draft(arguments.model_path, dtype=target.dtype)
    head = head.to(target.device).eval()
    fast = {"on": True, "off": False}.get(arguments.fast_linear, arguments.fast_linear)
    generators = {
        f"chain {k}": PseudoSpeculativeGenerator(target, head, "chain", k, fast_linear=fast) for k in arguments.steps
    }
    for shape in arguments.trees:
        topk, depth, nodes = (int(part) for part in shape.split(","))
        generators[f"tree {shape}"] = PseudoSpeculativeGenerator(
            target, head, "tree", topk=topk, depth=depth, num_nodes=nodes, fast_linear=fast
        )
    if arguments.contexts:
        speeds_by_context(target, generators, arguments)
        return
    speeds = time_generators(
        list(generators.values()), load_prompts(arguments.prompts), arguments.num_prompts, arguments.max_new_tokens
    )
    print(
        f"{target.name}, {'random head' if arguments.model_path is None else arguments.model_path}; "
        f"{package_commit()}; {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print(f"plain decoding: {1e3 * speeds[0].plain_step:.1f} ms a token, linear layers {arguments.fast_linear}")
    head_line = ("draft", "acceptance", "speed-up", "share", "step cost", "= draft", "+ verify", "+ rest", "lost to")
    rows, data = [head_line], []
    for name, speed in zip(generators, speeds, strict=True):
        parts = [part / speed.plain_step for part in (speed.draft_step, speed.verify_step, speed.other_step)]
        rows.append(
            (
                name,
                f"{speed.acceptance_length:.3f}",
                f"{speed.speedup:.2f}x",
                f"{100 * speed.efficiency:.0f} %",
                f"{speed.break_even:.2f}",
                *(f"{part:.2f}" for part in parts),
                lost(speed),
            )
        )
        measured = {key: value for key, value in vars(speed).items() if key != "divergences"}
        data.append({"draft": name, **measured, "break_even": speed.break_even, "efficiency": speed.efficiency})
    print(format_table(rows))
    print("texts: " + "; ".join(f"{name}: {same_text(speed)}" for name, speed in zip(generators, speeds, strict=True)))
    print("costs in plain steps; drafting pays where the acceptance length is above the step cost")
    print("lost to: where the rest of the acceptance length goes, in per cent of it")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


NODES = (1, 4, 9)


def by_context(target, arguments) -> None:
    """Seconds of a pass over 1, 4 and 9 nodes behind contexts of several lengths."""
    import torch

    from modelopt_eagle.common.package import package_commit
    from modelopt_eagle.decoding.cpu_linear import FastLinears
    from modelopt_eagle.validation.report import format_table

    fast = FastLinears.shared(target.model, {"on": True, "off": False}.get(arguments.fast_linear, "auto"))
    rows = [("context", "transformers", *(f"{nodes} nodes" for nodes in NODES), "1 over transformers")]
    rows[0] += tuple(f"{nodes} over 1" for nodes in NODES[1:])
    data, used, begun = [], time.process_time(), time.perf_counter()
    with torch.inference_mode():
        for context in arguments.contexts:
            times, own = time_passes(target, context, arguments.repeats, arguments.attention == "grouped", fast)
            data.append({"context": context, "seconds": times, "transformers": own})
            shares = [times[1] / own, *(times[nodes] / times[1] for nodes in NODES[1:])]
            spent = (f"{1e3 * seconds:.1f} ms" for seconds in (own, *times.values()))
            rows.append((str(context), *spent, *(f"{share:.2f}" for share in shares)))
    share = (time.process_time() - used) / (time.perf_counter() - begun)
    print(
        f"{target.name}; {package_commit()}; {torch.get_num_threads()} threads, {platform.machine()}, torch "
        f"{torch.__version__}; {100 * share:.0f} % of the time on a processor"
    )
    print(format_table(rows))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def time_passes(target, context: int, repeats: int, lend: bool, fast) -> tuple[dict[int, float], float]:
    """Best seconds of a pass by number of nodes, and of one token by the model as transformers runs it; all take
    turns. The caches hold random keys, unread."""
    import torch

    from modelopt_eagle.decoding.masks import causal
    from modelopt_eagle.decoding.target_runner import TargetRunner

    alone = target.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    capacity = context + 2 * max(NODES)
    own = TargetRunner(target, (), capacity, 1, lend=False)
    ours = TargetRunner(target, target.default_aux_layer_ids(), capacity, max(NODES), lend)
    turns = [(own, (1,), None), (ours, NODES, fast)]
    best = {(runner, nodes): float("inf") for runner, sizes, _ in turns for nodes in sizes}
    for repeat in range(repeats):
        for runner, sizes, linears in turns:
            with ExitStack() as stack:
                if linears is not None:
                    stack.enter_context(linears.use())
                stack.enter_context(runner)
                if repeat == 0:
                    runner.prefill(torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1])
                    for pool in runner.cache.tensors():
                        pool.normal_()
                for nodes in sizes:
                    tokens = torch.randint(target.vocab_size, (1, nodes), device=target.device)
                    sees, depths = causal(nodes, target.device)
                    started = clock()
                    runner.verify(tokens, [context], sees, depths)[0].sum().item()
                    best[runner, nodes] = min(best[runner, nodes], clock() - started)
    return {nodes: best[ours, nodes] for nodes in NODES}, best[own, 1]


def speeds_by_context(target, generators: dict, arguments) -> None:
    """Acceptance and speed-up of generators on prompts of several lengths, prefill left out of the share."""
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.validation.dialogues import first_turn
    from modelopt_eagle.validation.report import format_table
    from modelopt_eagle.validation.speed import measure_speed

    chats = [first_turn(target, prompt) for prompt in load_prompts(arguments.prompts) if not prompt.parts]
    rows, data = [("context", "draft", "acceptance", "speed-up", "share", "with prefill", "on a processor")], []
    for context in arguments.contexts:
        prompts = [long_prompt(chats, place, context) for place in range(min(arguments.num_prompts, len(chats)))]
        speeds = measure_speed(list(generators.values()), prompts, arguments.max_new_tokens)
        for name, speed in zip(generators, speeds, strict=True):
            decoding = speed.acceptance_length / speed.break_even
            share = "?" if speed.processor_share is None else f"{100 * speed.processor_share:.0f} %"
            rows.append(
                (
                    str(context),
                    name,
                    f"{speed.acceptance_length:.3f}",
                    f"{decoding:.2f}x",
                    f"{100 / speed.break_even:.0f} %",
                    f"{speed.speedup:.2f}x",
                    share,
                )
            )
            measured = {key: value for key, value in vars(speed).items() if key != "divergences"}
            data.append({"context": context, "draft": name, **measured, "decoding_speedup": decoding})
    print(format_table(rows))
    print("share: of the acceptance length that arrives as speed-up over plain decoding, steps alone (80 % is the aim)")
    if arguments.output is not None:
        passes = json.loads(arguments.output.read_text(encoding="utf-8"))
        arguments.output.write_text(json.dumps({"passes": passes, "speeds": data}, indent=2) + "\n", encoding="utf-8")


def long_prompt(chats: list[list[int]], place: int, length: int) -> list[int]:
    """The last ``length`` tokens of the chats one after the other, that at ``place`` the last of them."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens = chats[place % len(chats)] + tokens
        place -= 1
    return tokens[-length:]


def lost(speed) -> str:
    """What keeps the speed-up below the acceptance length, in per cent of it: they add up to 100 less the share."""
    costs = {
        "draft": speed.draft_step,
        "verify": speed.verify_step - speed.plain_step,
        "rest": speed.other_step,
    }
    step = speed.draft_step + speed.verify_step + speed.other_step
    parts = {name: 100 * cost / step for name, cost in costs.items()}
    parts["prefill"] = 100 * (1 - speed.efficiency) - sum(parts.values())
    return ", ".join(f"{name} {part:.0f}" for name, part in parts.items())


def random_head(target):
    """An untrained head over the 8192 lowest ids."""
    import torch

    from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule

    size = min(8192, target.vocab_size)
    torch.manual_seed(0)
    config = DraftConfig.from_target(target.config, draft_vocab_size=size)
    return EagleModule(config, DraftVocab.from_target_ids(torch.arange(size), target.vocab_size))


if __name__ == "__main__":
    main()
