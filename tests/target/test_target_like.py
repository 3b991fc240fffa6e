"""What the rooms read of a target: the loaded model and its tables have it, and so may a class of somebody else."""

import dataclasses
import inspect
import json
import pickle

import pytest

from modelopt_eagle.export.write import target_identity
from modelopt_eagle.target import RunningTarget, TableTarget, Target, TargetIdentity, TargetTables, load_target_tables


def test_the_loaded_model_and_its_tables_have_the_same_members(tiny_target, tiny_target_dir):
    tables = load_target_tables(tiny_target_dir)
    assert isinstance(tiny_target, RunningTarget) and isinstance(tiny_target, TableTarget)
    assert isinstance(tables, TableTarget) and not isinstance(tables, RunningTarget)
    assert (tables.hidden_size, tables.num_layers, tables.vocab_size) == (64, 8, 256)
    assert tables.embedding_weight.equal(tiny_target.embedding_weight)
    for name in ("hidden_size", "num_layers", "vocab_size"):
        assert getattr(tables, name) == getattr(tiny_target, name)


@pytest.mark.parametrize("protocol, own", [(TableTarget, TargetTables), (RunningTarget, Target)])
def test_methods_of_a_protocol_have_the_parameters_of_ours(protocol, own):
    for name, method in vars(protocol).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            asked, given = (list(inspect.signature(f).parameters) for f in (method, getattr(own, name)))
            assert asked == given, name


def test_an_identity_is_frozen_and_reads_as_a_mapping(tiny_target):
    identity = tiny_target.identity()
    assert isinstance(identity, TargetIdentity)
    assert dict(identity) == identity.as_dict() == json.loads(json.dumps(dict(identity)))
    assert identity["model"] == identity.model and len(identity) == 7 and "revision" in identity
    assert identity.get("aux_layer_ids") is None
    with pytest.raises(KeyError):
        identity["keys"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.model = "other"
    assert pickle.loads(pickle.dumps(identity)) == identity and hash(identity) == hash(tiny_target.identity())
    assert target_identity(identity) == target_identity(tiny_target) == target_identity(dict(identity))
