"""Heads of the tiny target that know its answers, served by a real llama.cpp; and one that it must not pass."""

import json

import pytest
import torch

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.export.gguf import GGUF_FILE, export_gguf
from modelopt_eagle.serving.check import HeadToServe, ServingCheck
from tests.conftest import LLAMA_CPP, python_of
from tests.decoding.heads import learn_answers, learn_by_recipe

QUESTIONS = ["Count to nine.", "Name a colour.", "What is rain?", "Say it again.", "Why?", "A word, please."]
VARIANTS = {
    "plain": dict(draft_vocab_size=None),
    "reduced": dict(draft_vocab_size=160),
    "flags": dict(draft_vocab_size=None, norm_before_residual=True, norm_before_fc=True),
}
"""What llama.cpp reads of a head, each value once."""
BLOCKS = {
    "1 layer, block 4": (4, None, ["eagle.num_layers=1"]),
    "3 layers, block 8, target's": (8, None, ["eagle.num_layers=3", "dflash.head=target"]),
    "3 layers, block 4, causal, reduced": (4, 128, ["eagle.num_layers=3", "dflash.causal=true"]),
    "2 layers, block 8, causal, two captured layers": (
        8, None, ["eagle.num_layers=2", "dflash.causal=true", "eagle.aux_layer_ids=[2, 5]"],
    ),
}  # fmt: skip
"""The same of DFlash heads: block, draft vocabulary and recipe."""


@pytest.fixture(scope="module")
def check(tiny_target_dir, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": n, "turns": [text]}) for n, text in enumerate(QUESTIONS)))
    return ServingCheck(
        str(tiny_target_dir), engine="llama.cpp", engine_python=python_of(LLAMA_CPP), prompts=prompts,
        max_new_tokens=40, num_speculative_tokens=7,
    )  # fmt: skip


@pytest.fixture(scope="module")
def learnt(check, tmp_path_factory):
    """``learnt(name)``: a head that drafts the target's own answers well, exported."""
    made = {}

    def learn(name):
        if name not in made:
            torch.manual_seed(1)
            options = dict(VARIANTS[name])
            size = options["draft_vocab_size"]
            config = DraftConfig.from_target(check.target.config, **options)
            config.tokenizer_hash = check.target.identity()["tokenizer_hash"]
            counts = torch.arange(config.vocab_size, 0, -1)
            vocab = None if size is None else DraftVocab.from_counts(counts, size, [0, 1, 2, 3])
            head = learn_answers(check.target, EagleModule(config, vocab), check.prompts, length=40)
            made[name] = head, tmp_path_factory.mktemp("heads") / name
            export_checkpoint(head, None, made[name][1])
        return made[name]

    return learn


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_is_served_as_it_was_trained(name, check, learnt):
    _, folder = learnt(name)
    (report,) = check.check_all([HeadToServe(folder, steps=3)])
    print("\n" + report.table())
    assert report.passed, report.table()
    assert report.our_per_position[0] > 0.4 and report.drafts > 50 and report.left_out == []


@pytest.mark.parametrize("name", BLOCKS)
def test_a_dflash_head_drafts_what_it_drafts_here(name, check, tmp_path):
    block, size, options = BLOCKS[name]
    overrides = ["algorithm=dflash", f"dflash.block_size={block}", *options]
    head = learn_by_recipe(check.target, check.prompts, overrides, length=40, updates=40, draft_vocab_size=size)
    export_checkpoint(head, None, tmp_path / "export", target=check.target)
    (report,) = check.check_all([HeadToServe(tmp_path / "export", steps=block - 1)])
    print("\n" + name + "\n" + report.table())
    assert report.passed, report.table()
    assert report.our_per_position[0] > 0.3 and report.our_per_position[2] > 0 and report.proposals > 150
    assert report.proposals_equal == report.proposals


def test_a_block_of_the_other_order_is_noticed(check, tmp_path):
    """The key ``attention.causal`` of a bidirectional head, in the file that the server reads."""
    overrides = ["algorithm=dflash", "dflash.block_size=8", "eagle.num_layers=3"]
    head = learn_by_recipe(check.target, check.prompts, overrides, length=40, updates=40)
    export_checkpoint(head, None, tmp_path / "export", target=check.target)
    head.config.causal = True
    export_gguf(head, tmp_path / "wrong", dtype=torch.float32, target_layers=check.target.num_layers)
    (report,) = check.check_all([HeadToServe(tmp_path / "wrong", tmp_path / "export", 7)])
    print("\n" + report.table())
    assert not report.passed and report.proposals_equal < 0.99 * report.proposals


def test_layers_off_by_one_are_noticed(check, learnt, tmp_path):
    """The fault of the two numbering habits, in the file that the server reads."""
    head, folder = learnt("plain")
    right = head.config.aux_layer_ids
    head.config.aux_layer_ids = tuple(layer - 1 for layer in right)
    try:
        export_gguf(head, tmp_path / "off", dtype=torch.float32, target_layers=check.target.num_layers)
    finally:
        head.config.aux_layer_ids = right
    assert (tmp_path / "off" / GGUF_FILE).is_file()
    (report,) = check.check_all([HeadToServe(tmp_path / "off", folder, 3)])
    print("\n" + report.table())
    assert not report.passed and report.our_per_position[0] > report.per_position[0] + 0.05
