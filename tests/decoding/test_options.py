"""Bad input is refused with a clear error, and everything is as it was before."""

import pytest
import torch

from modelopt_eagle.decoding import DraftPlan, PlainGenerator, PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.draft.plan import read_engine_options
from modelopt_eagle.errors import DecodingError, TargetError


def tree(**options):
    return lambda target, head: PseudoSpeculativeGenerator(target, head, mode="tree", **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (tree(depth=3), "topk is missing"),
        (tree(topk=2), "depth is missing"),
        (tree(topk=0, depth=3), "topk must be an integer of at least 1"),
        (tree(topk=2, depth=0), "depth must be"),
        (tree(topk=300, depth=2), "at most the draft vocabulary, 256"),
        (tree(topk=2, depth=3, num_nodes=3), r"\[4, 11\]"),
        (tree(topk=2, depth=3, num_nodes=12), r"\[4, 11\]"),
        (lambda t, h: PseudoSpeculativeGenerator(t, h, topk=2), 'mode is "chain"'),
        (lambda t, h: PseudoSpeculativeGenerator(t, h, mode="bush"), '"chain" or "tree"'),
        (lambda t, h: PseudoSpeculativeGenerator(t, h, num_steps=-1), "num_steps"),
        (lambda t, h: PseudoSpeculativeGenerator(t, None), "needs a draft head"),
        (lambda t, h: PseudoSpeculativeGenerator(t.model, h), "expected a Target, found LlamaForCausalLM"),
        (lambda t, h: PseudoSpeculativeGenerator(t, h, max_batch=0), "max_batch"),
    ],
)
def test_generator_options(target, head, make, words):
    with pytest.raises(DecodingError, match=words):
        make(target, head)


def test_engine_options():
    plan = DraftPlan.from_engine_options(max_draft_len=3, use_dynamic_tree=True, dynamic_tree_topk=4)
    assert plan == DraftPlan(3, 4, 13)  # max_total_draft_tokens defaults to T·D, the root comes on top
    plan = DraftPlan.from_engine_options(
        max_draft_len=3, use_dynamic_tree=True, dynamic_tree_topk=2, max_total_draft_tokens=10
    )
    assert plan.num_nodes == 11
    assert DraftPlan.from_engine_options(max_draft_len=4) == DraftPlan.chain(4)
    assert DraftPlan.tree(2, 1) == DraftPlan(1, 2, 3) and DraftPlan.tree(1, 4).num_nodes == 5
    for options, words in (
        (dict(dynamic_tree_topk=4), "use_dynamic_tree is off"),
        (dict(max_total_draft_tokens=4), "use_dynamic_tree is off"),
        (dict(use_dynamic_tree=True), "dynamic_tree_topk > 0"),
        (dict(use_dynamic_tree=True, dynamic_tree_topk=0), "dynamic_tree_topk > 0"),
        (dict(use_dynamic_tree=True, dynamic_tree_topk=2, max_total_draft_tokens=2), r"\[3, 10\]"),
        (dict(use_dynamic_tree=True, dynamic_tree_topk=2, max_total_draft_tokens=11), r"\[3, 10\]"),
    ):
        with pytest.raises(DecodingError, match=words):
            DraftPlan.from_engine_options(max_draft_len=3, **options)


REAL = dict(decoding_type="Eagle3", speculative_model="head", eagle3_one_model=True, max_draft_len=3)


def test_engine_options_by_their_own_names(tmp_path):
    """TensorRT-LLM's keys and bounds: at most T·D drafted tokens, and a batch size for trees."""
    tree = dict(REAL, use_dynamic_tree=True, dynamic_tree_max_topK=4, max_batch_size=8)
    assert DraftPlan.from_engine_options(**tree) == DraftPlan(3, 4, 13)
    assert DraftPlan.from_engine_options(**tree, max_total_draft_tokens=7).num_nodes == 8
    assert DraftPlan.from_engine_options(**REAL, max_total_draft_tokens=3) == DraftPlan.chain(3)
    for options, words in (
        (dict(tree, max_batch_size=None), "needs max_batch_size"),
        (dict(tree, max_total_draft_tokens=13), r"\[3, 12\] for dynamic_tree_max_topK 4"),
        (dict(tree, dynamic_tree_max_topK=0), "dynamic_tree_max_topK > 0"),
        (dict(tree, dynamic_tree_topk=4), "both say T"),
        (dict(tree, use_dynamic_tree=False), "use_dynamic_tree is off"),
        (dict(REAL, use_dynamic_tree="yes"), "true or false"),
        (dict(REAL, eagle_choices=[[0], [1]]), "static tree"),
        (dict(REAL, decoding_type="NGram"), "decoding_type must be Eagle3"),
        (dict(REAL, max_draft_length=3), "unknown option max_draft_length; did you mean max_draft_len"),
        (dict(decoding_type="Eagle3"), "max_draft_len is missing"),
    ):
        with pytest.raises(DecodingError, match=words):
            DraftPlan.from_engine_options(**options)
    file = tmp_path / "options.yaml"
    file.write_text(
        "max_batch_size: 8\nspeculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 3\n"
        "  use_dynamic_tree: true\n  dynamic_tree_max_topK: 2\n"
    )
    assert read_engine_options(file) == DraftPlan(3, 2, 7)
    file.write_text('{"max_draft_len": 5}')
    assert read_engine_options(file) == DraftPlan.chain(5)
    file.write_text("- 3")
    with pytest.raises(DecodingError, match="expected a mapping"):
        read_engine_options(file)
    with pytest.raises(DecodingError, match="expected JSON or YAML"):
        read_engine_options(tmp_path / "none.json")


def test_sampling_options():
    for options, words in (
        (dict(temperature=-1), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(top_p=0), "top_p"),
        (dict(min_p=1.5), "min_p"),
    ):
        with pytest.raises(DecodingError, match=words):
            SamplingOptions(**options)


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ([], {}, "no prompts"),
        ([[]], {}, "at least one prompt token"),
        (["a text"], {}, "must hold token ids"),
        ([[[5]]], {}, "must hold token ids"),
        (torch.ones(1, 2), {}, "must be integers of shape"),
        (torch.ones(1, 1, 2, dtype=torch.int64), {}, "must be integers of shape"),
        ([[5, 999]], {}, "outside the vocabulary of 256"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[5]], {"max_new_tokens": [3, 4]}, "2 values for 1 requests"),
        ([[5]], {"temperature": [0.1, 0.2]}, "2 values for 1 requests"),
        ([[5]], {"max_new_tokens": 3000}, "made for 2048"),
        ([[5], [6], [7]], {}, "there are 2 slots"),
        ([[5] * 30], {"max_new_tokens": 10}, "44 slots are needed"),
        ([[5]], {"stop_strings": "word"}, "list of texts"),
        ([[5]], {"stop_strings": [""]}, "empty stop string"),
        ([[5]], {"attention_mask": torch.ones(1, 1)}, "needs none"),
    ],
)
def test_generate_arguments(target, head, inputs, options, words):
    generator = PseudoSpeculativeGenerator(target, head, max_batch=2, cache_length=40)
    if "made for" in words:
        generator.cache_length = None
    with pytest.raises(DecodingError, match=words):
        generator.generate(inputs, **{"max_new_tokens": 4, **options})


def test_head_of_another_target_is_refused(target, head):
    """B35 among others."""
    for change, words in (
        (dict(vocab_size=300), "vocabulary of 300"),
        (dict(target_hidden_size=32), "width 32"),
        (dict(tokenizer_hash="0123456789abcdef"), "token ids mean other words"),
        (dict(aux_layer_ids=(1, 2, 11)), "from 0 to 7"),
    ):
        kept = {name: getattr(head.config, name) for name in change}
        for name, value in change.items():
            setattr(head.config, name, value)
        try:
            with pytest.raises((DecodingError, TargetError), match=words):
                PseudoSpeculativeGenerator(target, head)
        finally:
            for name, value in kept.items():
                setattr(head.config, name, value)


@pytest.mark.parametrize("place", ["draft", "verify", "callback"])
@pytest.mark.parametrize("options", [dict(num_steps=3), dict(mode="tree", topk=2, depth=3)], ids=["chain", "tree"])
def test_everything_is_restored_after_an_exception(target, good_head, prompts, greedy, monkeypatch, options, place):
    from modelopt_eagle.decoding.target_runner import TargetRunner
    from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())

    before, listen = hooks(), None
    good_head.train()
    target.model.train()
    calls = []

    def fail(*arguments, **more):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("stop here")
        return real(*arguments, **more)

    generator = PseudoSpeculativeGenerator(target, good_head, **options)
    with monkeypatch.context() as patch:
        if place == "draft":
            real = DraftLoop.advance
            patch.setattr(DraftLoop, "advance", fail)
        elif place == "verify":
            real = TargetRunner._forward
            patch.setattr(TargetRunner, "_forward", fail)
        else:
            real, listen = (lambda *a: None), fail
        with pytest.raises(RuntimeError, match="stop here"):
            generator.generate(prompts, 20, on_tokens=listen)
    assert hooks() == before
    assert good_head.training and target.model.training
    good_head.eval()
    target.model.eval()
    assert generator.generate(prompts, 20).tokens == [answer[:20] for answer in greedy]


def test_placement_of_the_cache_is_put_back(target):
    from modelopt_eagle.decoding.row_cache import RowCache

    cache = RowCache(8, 10)
    place = cache.place
    with pytest.raises(RuntimeError), cache.writing([4, 2], 3, torch.device("cpu")):
        assert place.start is None and place.width == 7
        raise RuntimeError
    assert (place.start, place.width) == (0, 0)
    with pytest.raises(DecodingError, match="holds 10 tokens a request, 12 are needed"):
        cache.writing([9, 2], 3, torch.device("cpu")).__enter__()


def test_plain_decoding_needs_no_head(target, prompts, greedy):
    assert PlainGenerator(target).generate(prompts[:1], 9).tokens == [greedy[0][:9]]
