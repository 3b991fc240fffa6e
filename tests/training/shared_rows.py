"""Entry of the launched processes in ``test_shared_rows.py``: each asks for two data sets and says what it got.

torchrun ... tests/training/shared_rows.py FOLDER DATA [--fail | --apart]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate import Accelerator

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.errors import DataError
from modelopt_eagle.features.store import dataset_hash
from modelopt_eagle.target.tiny import make_byte_tokenizer
from modelopt_eagle.training.shared_rows import RowsOfARun


def main() -> None:
    folder, data, *rest = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    shared = RowsOfARun(Path(folder) / (str(rank) if rest == ["--apart"] else "all"), accelerator)

    def say(line):
        print(f"[{rank} {line}]\n", end="", flush=True)

    def make(place):
        say("reads")
        if rest == ["--fail"]:
            raise DataError("row 3 is broken")
        return prepare_dataset(make_byte_tokenizer(), data, folder=place)

    try:
        for _ in range(2):
            dataset = shared.read(make)
            say(f"has {dataset_hash(dataset.rows)[:8]} of {dataset.report.read} {dataset.report.dropped.most_common()}")
    except DataError as error:
        say(f"refuses: {error}")


if __name__ == "__main__":
    main()
