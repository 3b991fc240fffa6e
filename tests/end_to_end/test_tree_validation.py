"""A recipe with ``validation.mode: tree`` measures, writes and shows trees."""

import json

from modelopt_eagle.cli import train_and_export
from tests.end_to_end.test_pipeline import arguments
from tests.training.runs import write_conversations


def test_a_recipe_validates_with_trees(tiny_target_dir, tmp_path, capfd):
    """Its depth is that of a chain, ``num_steps``, where none is given."""
    output, data = tmp_path / "run", write_conversations(tmp_path / "rows.jsonl", 12)
    shape = ["validation.mode=tree", "validation.topk=4", "validation.num_steps=2", "validation.num_nodes=9"]
    command = arguments(tiny_target_dir, data, output, "training.epochs=1", *shape)
    assert train_and_export.main(command) == 0
    shown = capfd.readouterr()
    assert "tree of topk 4, depth 2, 9 nodes" in shown.err and "tree of 9 nodes" in shown.out
    measured = json.loads((output / "report" / "acceptance.json").read_text())
    assert measured["draft"] == {"mode": "tree", "topk": 4, "depth": 2, "num_nodes": 9}
    assert len(measured["per_position"]) == 2 and measured["speedup"] > 0
    card = (output / "export" / "README.md").read_text()
    assert "dynamic trees of topk 4, depth 2 and 9 nodes" in card
