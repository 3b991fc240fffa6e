"""How fast an acceptance length is measured: nvidia-modelopt's own validation, our generator, our teacher-forced walk.

    python scripts/benchmark/validation.py --model_path export --modelopt_python PYTHON

One target, one head, the same prompts of ``--context`` tokens each (the end of a chat of several turns) and the same
answers in one run, which are the target's own and end where it ends them. ``PYTHON`` belongs to an environment in which nvidia-modelopt can run its EAGLE code:

    python3 -m venv DIR && DIR/bin/pip install torch==2.13.0 "transformers==5.12.*" nvidia-modelopt==0.47.0 accelerate requests

Without it modelopt's rows are left out. Rates are answer tokens judged a second of processor time; modelopt judges
``--modelopt_prompts`` of the prompts only, as it is slow. Generators count their prefill.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="quickstart", help="folder or quickstart (default)")
    parser.add_argument("--model_path", required=True, help="an exported head of the target")
    parser.add_argument("--modelopt_python", help="python of an environment with nvidia-modelopt; see above")
    parser.add_argument("--modelopt_prompts", type=int, default=1, help="prompts that modelopt judges (default 1)")
    parser.add_argument("--num_prompts", type=int, default=16, help="prompts judged by the others (default 16)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt (default 256)")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--steps", type=int, default=3, help="drafted tokens of a chain (default 3)")
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[1, 8, 16], help="of the generator (1 8 16)")
    parser.add_argument("--output", type=Path, help="write the rows as JSON here")
    return parser


@dataclass
class Contender:
    """Answers judged by one way of measuring: seconds that passed, and seconds used on processors by all threads."""

    name: str
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    used: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answer tokens a second of the processors."""
        return self.tokens / self.used

    def stop(self, begun: tuple[float, float]) -> None:
        """Add what passed since :func:`clocks` gave ``begun``."""
        wall, used = clocks()
        self.seconds, self.used = self.seconds + wall - begun[0], self.used + used - begun[1]

    @property
    def length(self) -> float:
        """Tokens a round."""
        return self.tokens / max(1, self.rounds)


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock and of this process on its processors."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_args()
    import torch
    import transformers

    from modelopt_eagle.common.package import package_commit
    from modelopt_eagle.decoding import PlainGenerator
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.target import load_target
    from modelopt_eagle.validation.report import format_table

    target = load_target(arguments.target)
    head = load_draft(arguments.model_path, dtype=target.dtype).to(target.device).eval()
    prompts = long_prompts(target, arguments.num_prompts, arguments.context)
    answers = PlainGenerator(target).generate(prompts, arguments.max_new_tokens).tokens
    rows = []
    if arguments.modelopt_python is not None:
        rows += modelopt_rows(prompts[: arguments.modelopt_prompts], arguments)
    for size in arguments.batch_sizes:
        rows.append(generated(target, head, prompts, arguments, size))
    for size in (1, 8):
        rows.append(walked(target, head, prompts, answers, arguments.steps, size))
    check(rows, answers)
    print(
        f"{target.name}; {len(prompts)} prompts of {arguments.context} tokens, answers of up to "
        f"{arguments.max_new_tokens}, "
        f"chain of {arguments.steps}; {package_commit()}; {torch.get_num_threads()} threads, torch {torch.__version__},"
        f" transformers {transformers.__version__}"
    )
    sums = ("tokens", "rounds", "tokens/round", "seconds", "processor s")
    cells = [("measured by", *sums, "tokens/s", "times modelopt")]
    base = rows[0].rate if arguments.modelopt_python is not None else None
    for row in rows:
        times = "" if base is None else f"{row.rate / base:.1f}"
        cells.append((row.name, str(row.tokens), str(row.rounds), f"{row.length:.3f}", f"{row.seconds:.2f}",
                      f"{row.used:.2f}", f"{row.rate:.2f}", times))  # fmt: skip
    print(format_table(cells))
    print("tokens/s: answer tokens judged a second of processor time, which other work on the machine changes little")
    if arguments.output is not None:
        data = [{**{k: v for k, v in vars(row).items() if k != "answers"}, "rate": row.rate} for row in rows]
        arguments.output.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def long_prompts(target, count: int, context: int) -> list[list[int]]:
    """``count`` chats: shipped conversations and a prompt behind them, the last ``context`` tokens of each."""
    from modelopt_eagle.data import Message, load_prompts, read_conversations
    from modelopt_eagle.validation.dialogues import prompt_ids

    talks = [row.messages for row in read_conversations("quickstart").rows if row.messages[0].role == "user"]
    questions = load_prompts("quickstart")
    prompts = []
    for number in range(count):
        messages, place = [Message("user", questions[number % len(questions)].turns[0])], 7 * number
        while len(ids := prompt_ids(target, messages)) < context:
            messages = [*talks[place % len(talks)], *messages]
            place += 1
        prompts.append(ids[-context:])
    return prompts


def modelopt_rows(prompts, arguments) -> list[Contender]:
    """modelopt's validation as it is, and its rounds alone, with the target's text given."""
    import torch

    from modelopt_eagle.target.load import resolve

    request = {
        "prompts": prompts, "max_new_tokens": arguments.max_new_tokens, "steps": arguments.steps,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        script = Path(__file__).with_name("modelopt_validation.py")
        folders = [str(resolve(arguments.target)), arguments.model_path]
        command = [arguments.modelopt_python, str(script), *folders, str(file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"modelopt's validation failed:\n{run.stderr[-2000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    name = f"modelopt {found['modelopt']}"
    whole, alone = Contender(f"{name}, validate()"), Contender(f"{name}, its text given")
    for row in found["rows"]:
        for contender, spans in ((whole, (row["text"], row["rounds_alone"])), (alone, (row["rounds_alone"],))):
            contender.tokens += len(row["tokens"])
            contender.rounds += row["rounds"]
            contender.seconds += sum(wall for wall, _ in spans)
            contender.used += sum(used for _, used in spans)
            contender.answers.append(row["tokens"])
    return [whole, alone]


def generated(target, head, prompts, arguments, batch_size: int) -> Contender:
    """Our generator: what ``ar_validate.py`` runs."""
    from modelopt_eagle.decoding import PseudoSpeculativeGenerator

    generator = PseudoSpeculativeGenerator(target, head, "chain", arguments.steps)
    generator.generate(prompts[:1], 8)  # warm
    contender = Contender(f"generator, batch {batch_size}")
    for start in range(0, len(prompts), batch_size):
        begun = clocks()
        output = generator.generate(prompts[start : start + batch_size], arguments.max_new_tokens)
        contender.stop(begun)
        contender.tokens += sum(map(len, output.tokens))
        contender.rounds += output.steps
        contender.answers += output.tokens
    return contender


def walked(target, head, prompts, answers, steps: int, batch_size: int) -> Contender:
    """Our walk over the same text: one pass of the target, K of the head."""
    from modelopt_eagle.data import TokenizedRow
    from modelopt_eagle.features import OnlineSource
    from modelopt_eagle.training.acceptance import acceptance_walk

    rows = [
        TokenizedRow(str(n), "all", prompt + answer, [False] * len(prompt) + [True] * len(answer), len(prompt))
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    contender = Contender(f"walk, batch {batch_size}")
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        begun = clocks()
        source = OnlineSource(target, part, head.config.aux_layer_ids)
        batch = source.load(range(len(part)))
        walk = acceptance_walk(
            head, head.embed(batch.input_ids, target.embedding), batch.aux_hidden, batch.supervised,
            batch.target_top1, steps, batch.document_ids,
        )  # fmt: skip
        contender.stop(begun)
        contender.tokens += sum(map(len, answers[start : start + batch_size]))
        contender.rounds += walk.steps
    return contender


def check(rows: list[Contender], answers: list[list[int]]) -> None:
    """All judged the same text; a difference is printed, as it would make the rates another thing."""
    for row in rows:
        for number, (found, answer) in enumerate(zip(row.answers, answers, strict=False)):
            if found != answer:
                pairs = enumerate(zip(found, answer, strict=False))
                place = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(found), len(answer)))
                print(f"note: {row.name} parts from the plain text of prompt {number} at token {place}")


if __name__ == "__main__":
    main()
