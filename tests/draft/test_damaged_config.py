"""A config whose sizes no head has is refused before anything of that size is made."""

import json

import pytest

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import SHIPPED, find_algorithm
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.export.tensors import module_shapes
from tests.attacks.fuzzing import bounded
from tests.attacks.test_5_links import head  # noqa: F401

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_hidden_layers", "vocab_size")


@pytest.mark.parametrize("size", [2**31, 2**62])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_beyond_the_tensors_costs_no_memory(head, tmp_path, name, size):  # noqa: F811
    export_checkpoint(head, None, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {name: size}
    if name == "vocab_size":
        config["draft_vocab_size"] = size
    path.write_text(json.dumps(config))
    with bounded(20, 1 << 30), pytest.raises(CheckpointError):
        load_draft(tmp_path)


def test_medusa_heads_and_blocks_have_a_bound():
    fields = dict(
        hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_hidden_layers=1, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=64, vocab_size=64, draft_vocab_size=64, aux_layer_ids=(3,),
    )  # fmt: skip
    assert MedusaConfig(**fields, heads=8, blocks=2).heads == 8
    for sizes in ({"heads": 2**31}, {"blocks": 2**31}):
        with pytest.raises(CheckpointError, match="blocks are read"):
            MedusaConfig(**fields, **sizes)


@pytest.mark.parametrize("name", SHIPPED)
def test_shapes_are_those_of_the_head_itself(tiny_target, name):
    algorithm = find_algorithm(name)
    kind = next(k for k in (DraftConfig, *_below(DraftConfig)) if k.__dataclass_fields__["algorithm"].default == name)
    last = {"aux_layer_ids": (tiny_target.config.num_hidden_layers - 1,)} if name == "medusa" else {}
    config = kind.from_target(tiny_target.config, **last)
    state = algorithm.module(config).state_dict()
    made = {key: tuple(tensor.shape) for key, tensor in state.items() if key not in ("d2t", "t2d")}
    assert module_shapes(config) == made


def _below(kind):
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
