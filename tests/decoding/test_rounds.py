"""Rounds with heads of every kind: each draft is that of a loop which reads the text so far anew, as if nothing of the
rounds before were kept."""

import random

import pytest
import torch
from heads import LLAMA_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.rounds import DraftedRounds
from modelopt_eagle.draft.algorithm import SHIPPED, algorithm_of, find_algorithm
from modelopt_eagle.draft.trees import RoundTree
from modelopt_eagle.target.model import Target

VOCAB = 16
SIZES = {
    "eagle3": {"num_hidden_layers": 2, "sliding_window": 6},
    "peagle": {"num_hidden_layers": 2, "sliding_window": 6, "mask_token_id": VOCAB - 1},
    "dflash": {"num_hidden_layers": 2, "block_size": 5, "mask_token_id": VOCAB - 1},
    "medusa": {"heads": 4, "aux_layer_ids": (LLAMA_SIZES["num_hidden_layers"] - 1,)},
}
PLANS = {"chain": dict(num_steps=4), "tree": dict(mode="tree", topk=3, depth=3, num_nodes=9)}
PROMPTS = [[1, 3, 0, 2, 7, 7, 9], [5], [4, 4, 8], [2, 11, 6, 1, 0, 3, 9, 12, 13, 5, 1]]
LIMITS = [30, 4, 21, 12]


def drawn(model):
    """The same model with weights that make its choices clear."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0, 0.25)
    return model.float().eval()


@pytest.fixture(scope="module")
def small():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=128, **LLAMA_SIZES))
    model.generation_config.eos_token_id = None
    return Target(drawn(model), None, name="sixteen tokens")


def draft_anew(rounds, request):
    """The draft of a row by a loop of its own, from the target's features of the whole text."""
    ids = torch.tensor([request.prompt + request.tokens])  # [1,S]
    known, head = ids.shape[1] - 1, rounds.draft
    read = rounds.target.features(ids[:, :known], None, head.config.aux_layer_ids)
    drafter = algorithm_of(head.config).drafter(head, rounds.target.embedding, rounds.plan, None)
    loop = drafter.loop(1, known + 1)
    loop.commit(ids[:, 1:], read.final_hidden if rounds.reads_final else read.aux_hidden, [0], [known])
    return loop.draft([known], ids[0, -1:])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SHIPPED)
def test_each_draft_is_that_of_a_loop_which_reads_the_text_anew(small, name, plan, monkeypatch):
    algorithm = find_algorithm(name)
    head = drawn(algorithm.module(algorithm.config.from_target(small.config, **SIZES[name])))
    texts = PlainGenerator(small).generate(PROMPTS, LIMITS, eos_token_id=[]).tokens
    own, chance, compared = DraftedRounds._draft, random.Random(0), 0

    def draft(self, requests):
        nonlocal compared
        drafts = own(self, requests)
        for row, request in enumerate(requests):
            anew = draft_anew(self, request)
            if isinstance(drafts, RoundTree):
                for field in ("tokens", "parents"):
                    assert torch.equal(getattr(drafts.tree, field)[row], getattr(anew.tree, field)[0])
            else:
                assert torch.equal(drafts[row], anew[0])
                text, place = texts[request.index], len(request.tokens)
                count = min(chance.randrange(5), len(text) - place)
                drafts[row, :count] = torch.tensor(text[place : place + count], dtype=torch.int64)  # let it be accepted
            compared += 1
        return drafts

    monkeypatch.setattr(DraftedRounds, "_draft", draft)
    output = PseudoSpeculativeGenerator(small, head, **PLANS[plan]).generate(PROMPTS, LIMITS, eos_token_id=[])
    assert output.tokens == texts and compared == output.steps
    assert len({count for counts in output.accepted_lengths for count in counts}) >= 2  # rows part
