"""What a serving check counts on this side is what engines count: all accepted tokens of a draft, behind an end too."""

from types import SimpleNamespace

from modelopt_eagle.serving.check import ServingCheck, up_to_end

END = 9


def test_drafts_are_counted_as_engines_do(monkeypatch):
    texts = {
        1: ([5, 6, 7, 8, 4, 4, 4], [2, 0, 1, 0]),  # no end: the last rounds begin behind 5 tokens, or are cut there
        2: ([5, 6, END, 8, 4, 4, 4], [3, 1]),  # an end inside the first draft, all of which is right
        3: ([5, 6, 7, END, 4, 4, 4], [1, 2, 1]),  # an end in the second one
        4: ([END, 6, 7, 8, 4, 4, 4], [2, 1]),  # the prompt's own pass ends it: nothing is drafted
    }

    class Generator:
        def __init__(self, target, head, num_steps):
            assert num_steps == 3

        def generate(self, prompts, max_new_tokens, eos_token_id):
            assert eos_token_id == [] and len(prompts) <= 3
            chosen = [texts[prompt[0]] for prompt in prompts]
            return SimpleNamespace(
                tokens=[text[:max_new_tokens] for text, _ in chosen], accepted_lengths=[rounds for _, rounds in chosen]
            )

    monkeypatch.setattr("modelopt_eagle.decoding.generator.PseudoSpeculativeGenerator", Generator)
    check = ServingCheck.__new__(ServingCheck)
    check.target = SimpleNamespace(end_token_ids=(END, 77))
    check.prompts, check.batch_size, check.max_new_tokens = [[1], [2], [3], [4]], 3, 5
    check.say = lambda line: None
    tokens, counts, drafts = check.ours(SimpleNamespace(float=lambda: None), 3)
    assert tokens == [[5, 6, 7, 8, 4], [5, 6, END], [5, 6, 7, END], [END]]
    assert drafts == 2 + 1 + 2 and counts == [1 + 1 + 2, 1 + 1 + 1, 1]
    assert up_to_end([], (1,)) == [] and up_to_end([3, 1, 1], (1,)) == [3, 1]
