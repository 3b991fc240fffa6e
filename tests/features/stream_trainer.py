"""A trainer that streams, to be killed: a line for each batch, from the step that it is given on.

python -m tests.features.stream_trainer URL TARGET CONVERSATIONS START
"""

import json
import sys
import time

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.features import StreamedSource
from modelopt_eagle.target import load_target_tables
from tests.features.conftest import SERVED_LAYERS, TOKEN


def main(url, target, conversations, start):
    tables = load_target_tables(target)
    rows = prepare_dataset(tables.tokenizer, conversations)
    source = StreamedSource([url], rows, tables, SERVED_LAYERS, token=TOKEN)
    for batch in source.batches(0, batch_size=2, seed=4, start=int(start)):
        print(json.dumps({"rows": batch.row_ids, "sum": batch.aux_hidden.double().sum().item()}), flush=True)
        time.sleep(0.3)


if __name__ == "__main__":
    main(*sys.argv[1:])
