"""The tree drafted equals a slow reference that runs every path from scratch; a tree of branching 1 is the chain."""

import pytest
import torch
from heads import make_head

from modelopt_eagle.decoding import DraftPlan, PseudoSpeculativeGenerator
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.draft.eagle3.drawn import draw_draft
from modelopt_eagle.draft.trees import build_round_tree, chain_tree
from modelopt_eagle.kernels import unpack_mask
from modelopt_eagle.kernels.topk import stable_topk
from modelopt_eagle.training import rollout

TEXTS = [[5, 9, 33, 70, 12, 90, 41], [100, 3, 50], [7, 8]]

HEADS = {
    "one layer": {},
    "two layers": {"num_hidden_layers": 2},
    "norm_output": {"norm_output": True, "norm_before_residual": True},
    "latent attention": {
        "decoder_type": "kimik2",
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "reduced vocabulary": {"draft_vocab_size": 64},
    "windowed": {"sliding_window": 5},
    "windowed, two layers": {"sliding_window": 5, "num_hidden_layers": 2, "qk_norm": True},
}


def path_logprobs(target, head, text, path):
    """Log-probabilities [Vd] after drafting ``path`` behind ``text``: the teacher-forced rollout, nothing cached."""
    tokens = torch.tensor([text + path])  # [1,S]
    anchor = len(text) - 2
    aux = target.features(tokens[:, : anchor + 1], None, head.config.aux_layer_ids).aux_hidden
    missing = tokens.shape[1] - anchor - 1
    aux = torch.cat((aux, aux.new_full((1, missing, aux.shape[-1]), 7.0)), 1)  # never to be read
    output = rollout(head, head.embed(tokens, target.embedding), aux, len(path) + 1)
    return head.lm_head(output.hidden[len(path), 0, anchor]).log_softmax(-1)


def slow_history(target, head, text, topk, depth):
    """EAGLE-2's expansion with every path run from scratch: scores, tokens, parent_list."""
    ids = head.vocab.to_target(torch.arange(head.config.draft_vocab_size)).tolist()

    def best(logprobs):
        order = sorted(range(len(ids)), key=lambda i: (-float(logprobs[i]), i))[:topk]
        return [(float(logprobs[i]), ids[i]) for i in order]

    entries = [(score, [token]) for score, token in best(path_logprobs(target, head, text, []))]
    history, parents, survivors = list(entries), [-1], list(range(topk))
    for layer in range(1, depth):
        parents += survivors
        fresh = []
        for flat in survivors:
            score, path = history[flat]
            fresh += [(score + s, [*path, t]) for s, t in best(path_logprobs(target, head, text, path))]
        start = topk + topk * topk * (layer - 1)
        survivors = sorted(range(start, start + topk * topk), key=lambda f: (-fresh[f - start][0], f))[:topk]
        history += fresh
    return [score for score, _ in history], [path[-1] for _, path in history], parents


def committed_loop(target, head, plan, texts, fixed_shapes=False, rounds=1):
    """A loop that has read the texts, all at once or over several rounds of uneven size, and its last outputs."""
    lengths = [len(text) - 1 for text in texts]
    loop = DraftLoop(head, target.embedding, plan, len(texts), 32, fixed_shapes=fixed_shapes)
    aux = [target.features(torch.tensor([text]), None, head.config.aux_layer_ids).aux_hidden[0] for text in texts]
    done = [0] * len(texts)
    for turn in range(rounds):
        if turn == rounds - 1:
            counts = [length - have for length, have in zip(lengths, done, strict=True)]
        else:
            counts = [
                1 + (row + turn) % 2 if length - have > 2 else 1
                for row, (length, have) in enumerate(zip(lengths, done, strict=True))
            ]
        most = max(counts)
        tokens = torch.zeros(len(texts), most, dtype=torch.int64)
        features = torch.full((len(texts), most, aux[0].shape[-1]), 1e3)  # padding must not matter
        for row, (start, count) in enumerate(zip(done, counts, strict=True)):
            tokens[row, :count] = torch.tensor(texts[row][start + 1 : start + 1 + count])
            features[row, :count] = aux[row][start : start + count]
        output = loop.advance(tokens, features, done, counts)
        done = [have + count for have, count in zip(done, counts, strict=True)]
        if turn < rounds - 1:  # leave the keys of a rejected draft behind
            loop.tree(output, done) if plan.is_tree else loop.chain(output, done)
    return loop, output, lengths


@torch.no_grad()
@pytest.mark.parametrize("kind", HEADS)
def test_expansion_equals_every_path_from_scratch(target, kind):
    head = make_head(target, seed=3, **HEADS[kind])
    plan = DraftPlan.tree(3, 4, 12)
    for texts in (TEXTS, TEXTS[:1]):  # rows of different lengths, and the one-row path
        loop, output, lengths = committed_loop(target, head, plan, texts)
        history = loop.tree(output, lengths)
        for row, text in enumerate(texts):
            scores, tokens, parents = slow_history(target, head, text, 3, 4)
            assert history.tokens[row].tolist() == tokens
            assert history.parent_list[row].tolist() == parents
            torch.testing.assert_close(history.scores[row], torch.tensor(scores), atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kind", HEADS)
def test_each_drawn_node_is_drawn_from_the_heads_distribution_behind_its_path(target, kind, topk):
    head, plan = make_head(target, seed=5, **HEADS[kind]), DraftPlan.tree(topk, 4)
    for texts in (TEXTS, TEXTS[:1]):
        loop, output, lengths = committed_loop(target, head, plan, texts)
        uniforms = torch.rand(len(texts), 4, topk, generator=torch.Generator().manual_seed(0))
        roots = torch.tensor([text[-1] for text in texts])
        drawn = draw_draft(loop, output, lengths, roots, lambda logits: logits.softmax(-1), uniforms)
        tree = drawn.tree.tree
        assert drawn.probabilities.shape[1] == 1 + 3 * topk
        for row, text in enumerate(texts):
            for node in range(1 + 3 * topk):
                path, above = [], node
                while above > 0:
                    path.insert(0, int(tree.tokens[row, above]))
                    above = int(tree.parents[row, above])
                expected = path_logprobs(target, head, text, path).exp()
                torch.testing.assert_close(drawn.probabilities[row, node], expected, atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", HEADS)
def test_chain_steps_equal_the_rollout(target, kind):
    head = make_head(target, seed=4, **HEADS[kind])
    loop, output, lengths = committed_loop(target, head, DraftPlan.chain(5), TEXTS)
    drafted = loop.chain(output, lengths)
    ids = head.vocab.to_target(torch.arange(head.config.draft_vocab_size))
    for row, text in enumerate(TEXTS):
        path = []
        for _ in range(5):
            path.append(int(ids[path_logprobs(target, head, text, path).argmax()]))
        assert drafted[row].tolist() == path


@torch.no_grad()
@pytest.mark.parametrize("plan", [DraftPlan.chain(3), DraftPlan.tree(3, 3, 10)], ids=["chain", "tree"])
def test_draft_cache_after_rounds_equals_one_from_scratch(target, plan):
    """B150: only true features stay, and no key of a rejected draft."""
    head, texts = make_head(target, seed=5), [TEXTS[0], TEXTS[0][2:]]
    once, first, lengths = committed_loop(target, head, plan, texts)
    often, second, _ = committed_loop(target, head, plan, texts, rounds=3)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)
    for row, length in enumerate(lengths):
        for mine, theirs in ((once.cache.keys, often.cache.keys), (once.cache.values, often.cache.values)):
            torch.testing.assert_close(mine[0][row, :, :length], theirs[0][row, :, :length], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]], ids=["ragged", "one row"])
def test_fixed_shapes_draft_the_same(target, texts):
    head = make_head(target, seed=6)
    plan = DraftPlan.tree(3, 4, 12)
    loop, output, lengths = committed_loop(target, head, plan, texts)
    fixed, again, _ = committed_loop(target, head, plan, texts, fixed_shapes=True)
    free, padded = loop.tree(output, lengths), fixed.tree(again, lengths)
    assert torch.equal(free.tokens, padded.tokens) and torch.equal(free.parent_list, padded.parent_list)
    torch.testing.assert_close(free.scores, padded.scores, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]], ids=["ragged", "one row"])
def test_branching_one_is_the_chain_to_the_bit(target, texts):
    head = make_head(target, seed=7)
    chain, output, lengths = committed_loop(target, head, DraftPlan.chain(5), texts)
    tree, again, _ = committed_loop(target, head, DraftPlan.tree(1, 5), texts)
    assert torch.equal(output, again)
    drafted, history = chain.chain(output, lengths), tree.tree(again, lengths)
    assert torch.equal(drafted, history.tokens)
    for one, other in zip(chain.cache.keys + chain.cache.values, tree.cache.keys + tree.cache.values, strict=True):
        assert torch.equal(one, other)
    built = build_round_tree(history, tree.plan, torch.tensor([text[-1] for text in texts]))
    line = chain_tree(torch.cat((torch.tensor([[text[-1]] for text in texts]), drafted), 1))
    for name in ("tokens", "flat_ids", "parents", "depths", "mask", "first_child", "next_sibling"):
        assert torch.equal(getattr(built.tree, name), getattr(line, name)), name


def test_branching_one_generates_as_the_chain(target, good_head, prompts):
    chain = PseudoSpeculativeGenerator(target, good_head, num_steps=4).generate(prompts, 40)
    tree = PseudoSpeculativeGenerator(target, good_head, mode="tree", topk=1, depth=4).generate(prompts, 40)
    assert chain.tokens == tree.tokens and chain.accepted_lengths == tree.accepted_lengths


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 70])
def test_chain_as_a_tree_sees_what_came_before(count):
    tree = chain_tree(torch.arange(2 * count).view(2, count))
    assert torch.equal(unpack_mask(tree.mask, count)[1], torch.ones(count, count, dtype=torch.bool).tril())
    tree.check()


def test_more_nodes_never_accept_less(target, good_head, prompts):
    """B152, on fixed prompts: a larger tree of one shape holds the smaller one."""
    accepted = []
    for nodes in (4, 7, 13, 25):
        generator = PseudoSpeculativeGenerator(target, good_head, mode="tree", topk=4, depth=3, num_nodes=nodes)
        accepted.append(generator.generate(prompts, 30).acceptance_length)
    assert accepted == sorted(accepted) and accepted[-1] > accepted[0]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_topk_orders_ties_by_index(k):
    torch.manual_seed(0)
    values = torch.randint(-3, 4, (5, 2, 40)).float() / 2  # many ties, both signs, zeros
    values[0, 0, :4] = torch.tensor([-0.0, 0.0, float("-inf"), float("nan")])
    found, index = stable_topk(values, k)
    for row in values.flatten(0, 1).nan_to_num(nan=float("-inf")).unbind():
        order = sorted(range(40), key=lambda i: (-row[i].item(), i))[:k]
        assert index.flatten(0, 1)[0].tolist() == order
        assert torch.equal(found.flatten(0, 1)[0], row[order])
        index, found = index.flatten(0, 1)[1:, None], found.flatten(0, 1)[1:, None]
