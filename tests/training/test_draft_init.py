"""Training goes on from the heads of every tool, with their vocabulary map or a new one (model.draft_init)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.errors import CheckpointError, RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import train
from modelopt_eagle.training.head import continued_head, with_vocabulary
from tests.export.foreign import TOOLS, foreign
from tests.training.runs import small_recipe, write_conversations

STEPS = ("training.epochs=1", "training.max_steps=2")
IDS = [*range(100, 132), *range(140, 204, 2)]  # 64 tokens, some of them neighbours


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


def untrained_head(target, ids, **overrides):
    config = DraftConfig.from_target(target.config, len(ids), **overrides)
    torch.manual_seed(3)
    return EagleModule(config, DraftVocab.from_target_ids(torch.tensor(ids), 256))


@pytest.mark.parametrize("tool", TOOLS)
def test_train_goes_on_from_a_head_of_each_tool(tmp_path, tiny_target, tiny_target_dir, data, tool, capsys):
    """The map is kept, though this data would give another; the target's embedding in the folder is not learned."""
    head = untrained_head(tiny_target, IDS, norm_before_residual=tool == "speculators")
    folder = foreign(tool, head, tmp_path / tool, table=tiny_target.embedding.weight)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("")
    given = [
        f"model.base_model={tiny_target_dir}", f"data.train_path={data}", f"training.output_dir={tmp_path / 'run'}",
        "training.report_to=none", "training.batch_size=4", f"model.draft_init={folder}", *STEPS,
    ]  # fmt: skip
    assert run_command("train", ["--recipe", str(recipe), *given]) == 0
    assert "64 tokens of" in capsys.readouterr().err
    trained = load_draft(tmp_path / "run")
    assert torch.equal(trained.d2t, head.d2t) and torch.equal(trained.t2d, head.t2d)
    assert trained.config.aux_layer_ids == (1, 3, 4) and not trained.config.own_embedding
    assert trained.config.norm_before_residual == (tool == "speculators")
    change = (trained.fc.weight - head.fc.weight).abs().max()
    assert 0 < change < 0.02  # two steps away from where it was


def test_what_only_a_flag_answers_is_asked_for_by_conversion(tmp_path, tiny_target):
    head = untrained_head(tiny_target, list(range(0, 128, 2)))  # a map that reads either way
    folder = foreign("modelopt", head, tmp_path / "head")
    recipe = load_recipe(None, [f"model.draft_init={folder}"])
    with pytest.raises(CheckpointError, match="--d2t-convention.*convert the head first with scripts"):
        continued_head(recipe, tiny_target.identity())


def test_another_map_moves_each_row_with_its_token(tiny_target):
    """B27."""
    head = untrained_head(tiny_target, [5, 9, 20, 31])
    vocab = DraftVocab.from_target_ids(torch.tensor([9, 10, 31]), 256)
    moved, carried = with_vocabulary(head, vocab)
    assert carried == 2 and moved.config.draft_vocab_size == 3 and torch.equal(moved.target_ids, vocab.target_ids)
    old, new = head.lm_head.weight, moved.lm_head.weight
    assert torch.equal(new[0], old[1]) and torch.equal(new[2], old[3]) and torch.allclose(new[1], old.mean(0))
    for name, tensor in head.state_dict().items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            assert torch.equal(moved.state_dict()[name], tensor), name
    assert new.requires_grad and head.config.draft_vocab_size == 4


def test_the_map_is_rebuilt_only_when_told(tmp_path, tiny_target, tiny_target_dir, data):
    """B27: by size and data as for a new head, or from a map on the disk."""
    head = untrained_head(tiny_target, IDS)
    export_checkpoint(head, None, tmp_path / "head", target=tiny_target)
    rebuild = [f"model.draft_init={tmp_path / 'head'}", "model.draft_init_vocab=rebuild"]
    fresh = train(small_recipe(tiny_target_dir, data, tmp_path / "fresh", *STEPS, "eagle.draft_vocab_size=48"))
    said = train(small_recipe(tiny_target_dir, data, tmp_path / "run", *STEPS, *rebuild, "eagle.draft_vocab_size=48"))
    tensors, counted = (load_file(r.last_checkpoint / "model.safetensors") for r in (said, fresh))
    assert torch.equal(tensors["d2t"], counted["d2t"]) and tensors["lm_head.weight"].shape[0] == 48
    carried = int(head.t2d[counted["d2t"] + torch.arange(48)].sum())
    line = next(line for line in said.header if line.startswith("draft vocabulary"))
    assert f"rebuilt: {carried} rows" in line and f"{48 - carried} are new" in line and 0 < carried < 48
    again = train(small_recipe(tiny_target_dir, data, tmp_path / "run", *STEPS, *rebuild, "eagle.draft_vocab_size=48"))
    assert again.last_checkpoint == said.last_checkpoint
    state = json.loads((said.last_checkpoint / "draft_config.json").read_text())
    assert state["draft_vocab_size"] == 48
    with pytest.raises(RecipeError, match="is for a head that is continued"):
        load_recipe(None, ["model.draft_init_vocab=rebuild"])
    with pytest.raises(RecipeError, match="draft_init_vocab: rebuild makes a new one"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "kept", rebuild[0], "eagle.draft_vocab_size=48"))
