"""One command for a CUDA machine: every kernel against its reference, then its time against its floor.

    python scripts/benchmark/gpu_check.py [--cases 40] [--json report.json]
    python scripts/benchmark/gpu_check.py --dry_run        # without a GPU: the same steps with the references

Steps, the most valuable first, each in a process of its own, so that one that dies takes no other along: whole rounds,
and the draft loop alone, with and without their graph, all that every round gives, by a head that has learnt its text;
the kernels of training (``training_kernels.py``), compared and timed beside other ways to compute the same; a CUDA
graph that is replayed on new inputs; large batches that would show a race; torch.compile; FlexAttention beside the
attention of training; random cases of every operation (``kernels/parity.py``); and the table of ``kernels.py`` with its
targets: build plus verify under 20 us for batch 8 and 64 nodes, relocation at 70 % of the copy bandwidth. The JSON is
written after each.

Exit codes: 0 all right, 1 a kernel fails or differs, 3 no CUDA device here (also of a dry run in which every step ran),
4 correct but a speed target is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels as benchmark  # scripts/benchmark/kernels.py
import training_cases  # scripts/benchmark/training_cases.py
import training_kernels  # scripts/benchmark/training_kernels.py

from modelopt_eagle import kernels
from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.whole_rounds import WholeRounds
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.draft.eagle3.graphs import FIELDS, DraftGraphs
from modelopt_eagle.kernels import parity
from modelopt_eagle.target.model import Target
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import distillation_loss, rollout

OK, WRONG, NO_CUDA, SLOW = 0, 1, 3, 4
VERDICTS = {
    OK: "all right",
    WRONG: "a step failed or differs",
    NO_CUDA: "every step ran on the CPU with the references; no kernel and no graph was checked",
    SLOW: "correct, a target missed",
}
BUILD_AND_VERIFY_SECONDS, RELOCATION_SHARE = 20e-6, 0.70


def random_cases(count: int, device: str) -> dict[str, list[str]]:
    """Failures of every operation over ``count`` random cases on the device."""
    failures: dict[str, list[str]] = {}
    for name in parity.CHECKS:
        failures.update(parity.run_checks(device, kernel_backend(device), count, names=[name]))
        print(f"  {name:20} {count - len(failures[name])} of {count} cases equal", flush=True)
        for line in failures[name][:2]:
            print(f"    {line}")
    return failures


def kernel_backend(device: str) -> str:
    """What is checked against the references: the kernels, or in a dry run the references themselves."""
    return "triton" if device == "cuda" else "reference"


def large_trees(device: str) -> None:
    """Trees of 1025 nodes in a batch of 64, twenty times: threads of one program read what others wrote."""
    batch, turns = (64, 20) if device == "cuda" else (4, 1)
    history = [part.to(device) for part in parity.Cases(1, "cpu").history(batch, 11, 10)]
    expected = kernels.build_tree(*history, 1025, 11, backend="reference")
    predict = torch.where(
        expected.first_child >= 0, expected.tokens.gather(1, expected.first_child.clamp(min=0).long()), 0
    )
    path = kernels.verify_greedy(expected, predict, backend="reference")
    for _ in range(turns):
        tree = kernels.build_tree(*history, 1025, 11, backend=kernel_backend(device), debug=False)
        for field in ("flat_ids", "tokens", "parents", "depths", "mask", "first_child", "next_sibling"):
            parity.compare(field, getattr(tree, field), getattr(expected, field))
        accepted = kernels.verify_greedy(tree, predict, backend=kernel_backend(device))
        parity.compare("nodes", accepted.nodes, path.nodes)


def large_moves(device: str) -> None:
    """Keys of 512 rows whose accepted paths overlap their destinations, and a mask of 64 requests, in place."""
    cases = parity.Cases(2, "cpu")
    paths, counts = (part.to(device) for part in cases.accepted(512, 40, 24))
    lengths = torch.arange(512, device=device) % 50
    cache = torch.randn(512, 8, 96, 128, device=device, dtype=torch.bfloat16)
    other = cache.clone()
    kernels.relocate_kv(cache, paths, counts, lengths, debug=True, backend=kernel_backend(device))
    kernels.relocate_kv(other, paths, counts, lengths, backend="reference")
    parity.compare("keys", cache, other)
    requests = 64 if device == "cuda" else 4
    buffer = torch.randint(-(2**31), 2**31 - 1, (requests, 1025, 33), device=device, dtype=torch.int64).to(torch.int32)
    twin, rows = buffer.clone(), torch.randint(0, 1026, (requests,), device=device)
    used = int(rows.sum())
    tight = kernels.repack_mask(buffer, rows, 32, backend=kernel_backend(device))[:used]
    parity.compare("mask rows", tight, kernels.repack_mask(twin, rows, 32, backend="reference")[:used])


def graph_replay(device: str) -> None:
    """A captured build and verify must follow inputs that change in place."""
    first, second = ([part.to(device) for part in parity.Cases(seed, "cpu").history(8, 10, 7)] for seed in (3, 4))
    second = [new.to(old.dtype) for new, old in zip(second, first, strict=True)]
    inputs = [part.clone() for part in first]
    predict = torch.randint(0, 610, (8, 64), device=device, dtype=torch.int32)

    def step(backend: str):
        tree = kernels.build_tree(*inputs, 64, 10, backend=backend)
        return tree, kernels.verify_greedy(tree, predict, backend=backend)

    if device == "cuda":
        step("triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree, accepted = step("triton")
    for history in (second, first):
        for place, part in zip(inputs, history, strict=True):
            place.copy_(part)
        if device == "cuda":
            graph.replay()
            torch.cuda.synchronize()
        else:
            tree, accepted = step("reference")
        expected_tree, expected = step("reference")
        parity.compare("replayed flat ids", tree.flat_ids, expected_tree.flat_ids)
        parity.compare("replayed mask", tree.mask, expected_tree.mask)
        parity.compare("replayed nodes", accepted.nodes, expected.nodes)


def compiled_step(device: str) -> None:
    """torch.compile with its default backend takes build and verify as one graph."""
    history = [part.to(device) for part in parity.Cases(5, "cpu").history(8, 10, 7)]
    predict = torch.randint(0, 610, (8, 64), device=device, dtype=torch.int32)

    def step(scores, tokens, parent_list):
        tree = kernels.build_tree(scores, tokens, parent_list, 64, 10)
        return kernels.verify_greedy(tree, predict).nodes

    compiler = "inductor" if device == "cuda" else "eager"
    parity.compare("compiled nodes", torch.compile(step, fullgraph=True, backend=compiler)(*history), step(*history))


SHAPES = {"chain 5": dict(num_steps=5), "tree 8,5,33": dict(mode="tree", topk=8, depth=5, num_nodes=33)}
PROMPTS = [[5, 9, 33, 70], [100, 3, 50, 60, 70, 80, 90], [7], [44, 45, 46, 47, 48, 49], [200, 13]]
LIMITS = [48, 7, 30, 12, 21]  # rows leave the batch one by one
TIMED = ("whole", "draft replayed", "eager")


def draft_loop(device: str) -> dict[str, float]:
    """What the draft loop drafts with a CUDA graph and without, round by round, and milliseconds of drafting a round.

    The head has learnt the target's answers, so that a replay with old lengths, an old output or old keys drafts other
    tokens: with an untrained head whose drafts are never accepted nobody would see it. Both sides run over the same
    shapes, so all drafted tokens and all fields of all trees are equal to the bit. In float32 and, on a GPU, bfloat16.
    """
    spent: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        target, head = taught_pair(device, dtype)
        for name, shape in SHAPES.items():
            graph, plain = (
                PseudoSpeculativeGenerator(target, head, **shape, cuda_graph=switch)
                for switch in (device == "cuda", False)
            )
            if device != "cuda":
                graph._recorder = Repeat()
            plain._recorder = Call()
            compare_rounds(f"{name}, {str(dtype).removeprefix('torch.')}", graph, plain)
            if dtype == torch.float32:
                spent.update(time_loops(name, target, head, graph))
    return spent


def whole_round(device: str) -> dict[str, float]:
    """What whole rounds give with a CUDA graph and without, round by round, and milliseconds of a round.

    Compared as in :func:`draft_loop`: emitted tokens, the features that the next round reads, lengths and last tokens,
    to the bit, with the same function run call by call; and the texts in float32 with the round whose shapes are its
    own. The head has learnt its text, so a replay that keeps a length, a token, features or keys is seen.
    """
    spent: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        target, head = taught_pair(device, dtype)
        for name, shape in SHAPES.items():
            graph, called, plain = (
                PseudoSpeculativeGenerator(target, head, **shape, cuda_graph=switch)
                for switch in (device == "cuda", False, False)
            )
            if device != "cuda":
                graph._recorder = Repeat()
            called._recorder = Call()
            compare_whole_rounds(f"{name}, {str(dtype).removeprefix('torch.')}", graph, called, plain)
            if dtype == torch.float32:
                spent.update(time_rounds(name, target, head, shape, device))
    return spent


def compare_whole_rounds(name: str, graph, called, plain) -> None:
    """All that the rounds of the first two give, in batches that rows leave, twice; and the text of the third."""
    for turn in range(2):
        heard: list[list[dict[str, torch.Tensor]]] = []
        outputs = []
        for generator in (graph, called):
            rounds: list[dict[str, torch.Tensor]] = []
            with listening_to_rounds(rounds):
                outputs.append(generator.generate(PROMPTS, LIMITS, eos_token_id=[]))
            heard.append(rounds)
            refused = getattr(generator._whole, "refused", None)
            if refused is not None or not rounds:
                raise AssertionError(f"{name}: no whole round was replayed: {refused}")
        if outputs[1].acceptance_length < 1.5:
            raise AssertionError(f"{name}: the head has learnt too little for the check to mean anything")
        for place, (first, second) in enumerate(zip(*heard, strict=False)):
            for field, value in second.items():
                if first[field].shape != value.shape or not torch.equal(first[field], value):
                    raise AssertionError(f"{name}: {field} of round {place} differs (call {turn})")
        if outputs[0].tokens != outputs[1].tokens or outputs[0].accepted_lengths != outputs[1].accepted_lengths:
            raise AssertionError(f"{name}: the texts or what was accepted of them differ")
    exact = graph.target.dtype == torch.float32
    if exact and plain.generate(PROMPTS, LIMITS, eos_token_id=[]).tokens != outputs[0].tokens:
        raise AssertionError(f"{name}: the text is not that of rounds run call by call")


@contextmanager
def listening_to_rounds(rounds: list[dict[str, torch.Tensor]]):
    """Write down what each whole round inside gives."""
    own = WholeRounds.round

    def listened(self, lengths, counts, tokens, features):
        choice = own(self, lengths, counts, tokens, features)
        if choice is not None:
            kept = torch.zeros(choice.tokens.shape, dtype=torch.bool, device=choice.tokens.device)  # [B,D+1]
            for row, accepted in enumerate(choice.accepted):
                kept[row, : accepted + 1] = True
            rounds.append(
                {
                    "tokens": choice.tokens[kept].clone(),
                    "features": choice.features[kept].clone(),
                    "last tokens": choice.last.clone(),
                    "accepted": torch.tensor(choice.accepted),
                }
            )
        return choice

    WholeRounds.round = listened  # type: ignore[method-assign]
    try:
        yield
    finally:
        WholeRounds.round = own  # type: ignore[method-assign]


def time_rounds(name: str, target: Target, head: EagleModule, shape: dict, device: str) -> dict[str, float]:
    """Milliseconds of a round (drafting, verification, acceptance): whole, its draft replayed, and call by call."""
    spent, count = {}, 96 if device == "cuda" else 6
    for batch in (1, 8):
        for label in TIMED:
            replayed = label != "eager"
            generator = PseudoSpeculativeGenerator(target, head, **shape, cuda_graph=replayed and device == "cuda")
            if replayed and device != "cuda":
                generator._recorder = Repeat()
            if label == "draft replayed":
                generator._take_whole = lambda: None  # type: ignore[method-assign]
            prompts = [PROMPTS[0]] * batch
            generator.generate(prompts, count, eos_token_id=[])  # recordings are made
            output = generator.generate(prompts, count, eos_token_id=[])
            steps = max(len(accepted) for accepted in output.accepted_lengths)
            spent[f"{name}, batch {batch}, {label}"] = 1e3 * (output.timings.draft + output.timings.verify) / steps
        times = ", ".join(f"{spent[f'{name}, batch {batch}, {label}']:.3f} {label}" for label in TIMED)
        print(f"  {name}, batch {batch}: milliseconds a round: {times}")
    return spent


@functools.cache  # a dry run's steps share a process
def taught_pair(device: str, dtype: torch.dtype) -> tuple[Target, EagleModule]:
    """A target with the layers of a small model, and a head that has learnt its answers to ``PROMPTS``."""
    made = make_tiny_target(layers=8, hidden=1024 if device == "cuda" else 64, vocab=256, heads=8, kv_heads=4)
    target = Target(made.model.to(device), made.tokenizer, name=made.name)
    answers = PlainGenerator(target).generate(PROMPTS, 48, eos_token_id=[]).tokens
    torch.manual_seed(0)
    head = EagleModule(DraftConfig.from_target(target.config)).to(device)
    rows = [torch.tensor([p + a], device=device) for p, a in zip(PROMPTS, answers, strict=True)]  # [1,S] each
    features = [target.features(ids, None, head.config.aux_layer_ids) for ids in rows]
    ids = torch.cat(rows, 1)
    documents = torch.cat([torch.full_like(row, place) for place, row in enumerate(rows)], 1)
    supervised = torch.cat([torch.arange(row.shape[1], device=device)[None] >= row.shape[1] - 48 for row in rows], 1)
    aux, final = (torch.cat([getattr(f, name) for f in features], 1) for name in ("aux_hidden", "final_hidden"))
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3 if device == "cpu" else 1e-3)
    for _ in range(60):
        output = rollout(head, target.embedding(ids), aux, 3, documents, supervised=supervised)
        loss = distillation_loss(output, head, supervised, target_hidden=final, target_lm_head=target.lm_head_weight)
        optimizer.zero_grad()
        loss.loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    head = head.eval().requires_grad_(False).to(dtype)
    return Target(target.model.to(dtype), target.tokenizer, name=made.name), head


def compare_rounds(name: str, one: PseudoSpeculativeGenerator, other: PseudoSpeculativeGenerator) -> None:
    """Every draft of two generators, in batches that rows leave, twice; AssertionError names what differs and where."""
    for turn in range(2):  # the second time nothing is recorded
        rounds, outputs = [], []
        for generator in (one, other):
            drafts: list[dict[str, torch.Tensor]] = []
            generator._drafter = Listening(generator, drafts)
            outputs.append(generator.generate(PROMPTS, LIMITS, eos_token_id=[]))
            rounds.append(drafts)
        if outputs[1].acceptance_length < 1.5:
            raise AssertionError(f"{name}: the head has learnt too little for the check to mean anything")
        for place, (first, second) in enumerate(zip(*rounds, strict=False)):
            for field, value in second.items():
                if first[field].shape != value.shape or not torch.equal(first[field], value):
                    raise AssertionError(f"{name}: {field} of round {place} differs (call {turn})")
        if outputs[0].tokens != outputs[1].tokens or outputs[0].accepted_lengths != outputs[1].accepted_lengths:
            raise AssertionError(f"{name}: the texts or what was accepted of them differ")


class Listening:
    """A generator's own drafter, each draft of whose loops is written down."""

    def __init__(self, generator: PseudoSpeculativeGenerator, drafts: list[dict[str, torch.Tensor]]):
        self.inner = getattr(generator, "_heard", None)
        if self.inner is None:  # kept between calls, as the generator would
            self.inner = generator._heard = DraftGraphs(
                generator.draft, generator.target.embedding, generator.plan, generator._recorder
            )
        self.drafts = drafts

    def loop(self, batch: int, capacity: int):
        """The inner drafter's loop, listened to."""
        return Heard(self.inner.loop(batch, capacity), self.drafts)


class Heard:
    """A loop each draft of which is written down; it drafts only, so rounds are not recorded whole."""

    def __init__(self, loop, drafts: list[dict[str, torch.Tensor]]):
        self.loop, self.drafts = loop, drafts
        self.commit, self.keep = loop.commit, loop.keep

    def draft(self, lengths, roots):
        """The loop's draft."""
        found = self.loop.draft(lengths, roots)
        if isinstance(found, torch.Tensor):
            self.drafts.append({"tokens": found.clone()})
        else:
            fields = {name: getattr(found.tree, name).clone() for name in FIELDS}
            self.drafts.append({**fields, "sees": found.sees.clone()})
        return found


def time_loops(name: str, target: Target, head: EagleModule, graph: PseudoSpeculativeGenerator) -> dict[str, float]:
    """Milliseconds of drafting a round, with the graph and call by call."""
    spent = {}
    for batch in (1, 8):
        loops = {
            "graph": DraftGraphs(head, target.embedding, graph.plan, graph._recorder).loop(batch, 512),
            "eager": DraftLoop(head, target.embedding, graph.plan, batch, 512),
        }
        for label, loop in loops.items():
            spent[f"{name}, batch {batch}, {label}"] = round_milliseconds(loop, head, batch)
        fast, slow = (spent[f"{name}, batch {batch}, {label}"] for label in loops)
        print(f"  {name}, batch {batch}: {fast:.3f} ms a round with the graph, {slow:.3f} without")
    return spent


@torch.inference_mode()
def round_milliseconds(loop, head, batch: int) -> float:
    """Median milliseconds of a draft of 2 new anchors behind 300, until the device has finished."""
    device = head.fc.weight.device
    tokens = torch.randint(0, 256, (batch, 300), device=device)
    features = torch.randn(batch, 300, head.config.fc_input_size, device=device)
    loop.commit(tokens, features, [0] * batch, [300] * batch)

    def draft() -> None:
        loop.commit(tokens[:, :2], features[:, :2], [300] * batch, [2] * batch)
        loop.draft([302] * batch, tokens[:, 0])
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        draft()
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        draft()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


class Call:
    """A recorder that runs the region every time, call by call: what a graph is compared with."""

    def record(self, region, inputs):
        """Return a function that runs the region."""
        return lambda: region(*inputs)


class Repeat:
    """A recorder that runs the region every time: a dry run's stand-in for a graph."""

    def record(self, region, inputs):
        """Return a function that runs the region."""
        return lambda: region(*inputs)


def speed(report: dict, device: str) -> bool:
    """Time every workload, print the table, fill ``report``; whether all targets are met."""
    bandwidth = benchmark.copy_bandwidth(device)
    print(f"  {benchmark.machine(device)}; copy bandwidth {bandwidth / 1e9:.0f} GB/s (read + written)")
    rows, verdicts = [], {}
    for work in benchmark.all_workloads(device):
        try:
            timing = benchmark.measure(work, device)
        except Exception as error:  # one workload that does not run must not hide the others
            print(f"  {work.name}: {type(error).__name__}: {error}")
            verdicts[work.name] = False
            continue
        rows.append(benchmark.row_of(work, timing, bandwidth))
        if timing.kernel is None:
            continue
        if work.name == "build+verify":
            verdicts[f"build+verify {timing.kernel * 1e6:.1f} us < 20 us"] = timing.kernel < BUILD_AND_VERIFY_SECONDS
        if work.name.startswith("relocate_kv"):
            share = work.bytes_moved / timing.kernel / bandwidth
            verdicts[f"{work.name} {100 * share:.0f} % >= 70 % of copy bandwidth"] = share >= RELOCATION_SHARE
    if rows:
        benchmark.print_table(rows)
    for target, met in verdicts.items():
        print(f"  {'met   ' if met else 'MISSED'}  {target}")
    report.update(copy_bandwidth=bandwidth, rows=rows, targets=verdicts)
    return all(verdicts.values())


def kernels_of_training(device: str) -> None:
    """Each kernel of a training step against its reference, then its time; without a GPU the floors alone."""
    if device == "cuda":
        names = {name for kernel in training_kernels.KERNELS for name in kernel.contestants} - {training_cases.FLEX}
        if training_kernels.main(["--contestants", *sorted(names)]) != training_kernels.OK:
            raise AssertionError("a kernel of training fails or differs, see above")
        return
    machine = kernels.MACHINES["H200"]
    training_kernels.print_floors(
        [line for kernel in training_kernels.KERNELS for line in training_kernels.floor_lines(kernel, machine)]
    )


def flex_attention(device: str) -> None:
    """FlexAttention beside the attention of training; without a GPU compared at small sizes, as far as it runs there.

    It is compiled for every case, so it has a process and a time of its own.
    """
    only = ["--only", training_cases.ATTENTION.name, "--contestants", training_cases.FLEX]
    if training_kernels.main([*only, *(["--dry_run"] if device == "cpu" else [])]) == training_kernels.WRONG:
        raise AssertionError("FlexAttention, see above")


STEPS: dict[str, Callable[[str], object]] = {
    "whole_round": whole_round,
    "draft_loop": draft_loop,
    "kernels_of_training": kernels_of_training,
    "graph_replay": graph_replay,
    "large_trees": large_trees,
    "large_moves": large_moves,
    "compiled_step": compiled_step,
    "flex_attention": flex_attention,
}
"""The most valuable first: if time runs out, the least is lost."""
LIMIT, LONGER = 150, {"kernels_of_training": 400, "flex_attention": 400}
"""Seconds of one step's process; the kernels of training are compiled for each head width."""


def run_step(name: str, device: str, cases: int) -> dict:
    """One step here: its part of the report; ``wrong`` if it failed."""
    torch.manual_seed(0)
    found: dict = {}
    try:
        if name == "random_cases":
            found["random_cases"] = random_cases(cases, device)
            found["wrong"] = any(found["random_cases"].values())
        elif name == "speed":
            found["fast"] = speed(found, device)
        else:
            measured = STEPS[name](device)
            found[name] = "equal"
            if measured is not None:
                found[f"{name} ms"] = measured
    except Exception as error:  # the next step is to run all the same
        traceback.print_exc()
        found = {name: f"{type(error).__name__}: {error}", "wrong": True}
    return found


def run_apart(name: str, cases: int) -> dict:
    """One step in a process of its own, so that an illegal address or a hang takes no other step along."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "step.json"
        command = [sys.executable, __file__, "--step", name, "--cases", str(cases), "--json", str(answer)]
        try:
            code = subprocess.run(command, check=False, timeout=LONGER.get(name, LIMIT)).returncode
        except subprocess.TimeoutExpired:
            return {name: f"took more than {LONGER.get(name, LIMIT)} seconds", "wrong": True}
        if not answer.is_file():
            return {name: f"its process died with exit code {code}", "wrong": True}
        return json.loads(answer.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*STEPS, "random_cases", "speed")
    parser.add_argument("--cases", type=int, default=40, help="random cases of every operation")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each step")
    parser.add_argument("--dry_run", action="store_true", help="run every step on the CPU, references for kernels")
    parser.add_argument("--step", choices=names, help="run this step alone, in this process")
    options = parser.parse_args(arguments)
    device = "cpu" if options.dry_run else "cuda"
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "gpu_check: no CUDA device here, nothing was checked. On a CPU the references run (--dry_run); the kernels"
        )
        print("run only interpreted: TRITON_INTERPRET=1 python -m modelopt_eagle.kernels.parity --device cpu")
        return NO_CUDA
    report: dict = {"machine": benchmark.machine(device)}
    wrong, fast = False, True
    for name in (options.step,) if options.step else names:
        print(name, flush=True)
        apart = device == "cuda" and not options.step
        found = run_apart(name, options.cases) if apart else run_step(name, device, options.cases)
        wrong, fast = wrong or found.get("wrong", False), fast and found.get("fast", True)
        report.update({key: value for key, value in found.items() if key not in ("wrong", "fast")})
        if options.step:
            report |= {"wrong": wrong, "fast": fast}
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
        if name in report and isinstance(report[name], str):
            print(f"{name}: {report[name]}", flush=True)
    if options.dry_run:
        code = WRONG if wrong else NO_CUDA
    else:
        code = WRONG if wrong else OK if fast else SLOW
    print(f"gpu_check: {VERDICTS[code]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
