"""How fast conversations are read, rendered and tokenised.

    python scripts/benchmark/data_reading.py [--model quickstart] [--rows 5000] [--words 60] [--workers 1 2] [--on-disk]

Writes conversations of two turns each with words drawn from a fixed seed to a temporary file, reads them as training
does, and prints seconds and tokens for each number of processes, the best of ``--turns`` passes, and by how much the
memory of this process grew in the first one (its largest size before and after).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print a line a number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="whose tokenizer and template: any target, or tiny")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--words", type=int, default=60, help="words of a conversation")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--turns", type=int, default=3, help="passes, of which the best is printed")
    parser.add_argument("--on-disk", action="store_true", help="keep the tokens in a folder, as a run does")
    arguments = parser.parse_args()
    from modelopt_eagle.data import prepare_dataset

    tokenizer = load_tokenizer(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in conversations(arguments.rows, arguments.words)))
        prepare_dataset(tokenizer, path, max_rows=200)  # what is loaded once is not measured
        kept = Path(folder) / "tokens" if arguments.on_disk else None
        for workers in arguments.workers:
            seconds, before, grown = [], largest(), None
            for _ in range(arguments.turns):
                begun = time.perf_counter()
                data = prepare_dataset(tokenizer, path, max_length=2048, workers=workers, folder=kept)
                seconds.append(time.perf_counter() - begun)
                grown = largest() - before if grown is None else grown
            print(
                f"{workers} processes: {min(seconds):.2f} s for {data.report.rows} rows, {data.report.tokens} tokens, "
                f"{data.report.supervised_share:.1%} supervised; {grown / 2**20:.0f} MiB more",
                flush=True,
            )


def largest() -> int:
    """Bytes of memory that this process has held at most, as Linux counts them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_tokenizer(name: str):
    """The tokenizer of a target, without its weights where that is possible."""
    if name == "tiny":
        from modelopt_eagle.target.tiny import make_byte_tokenizer

        return make_byte_tokenizer()
    from modelopt_eagle.target.load import resolve

    place = resolve(name)
    if not place.is_dir():  # a GGUF file
        from modelopt_eagle.target import load_target_tables

        return load_target_tables(name).tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(place))


def conversations(rows: int, words: int):
    """``rows`` conversations of two answered turns of about ``words`` words together."""
    draw = random.Random(0)
    letters = "etaoinshrdlu"
    known = ["".join(draw.choice(letters) for _ in range(draw.randint(1, 8))) for _ in range(3000)]

    def text(count: int) -> str:
        return " ".join(draw.choice(known) for _ in range(count))

    for number in range(rows):
        turns = [("user", words // 6), ("assistant", words // 3)] * 2
        yield {"id": number, "messages": [{"role": role, "content": text(count)} for role, count in turns]}


if __name__ == "__main__":
    main()
