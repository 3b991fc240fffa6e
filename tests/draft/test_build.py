"""A head of given numbers."""

import torch

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.build import bare_head

SIZES = dict(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=40, draft_vocab_size=16, aux_layer_ids=(1, 3, 4),
)  # fmt: skip


def test_a_head_holds_the_tensors_and_draws_nothing():
    vocab = DraftVocab.from_target_ids(torch.arange(1, 32, 2), 40)
    given = EagleModule(DraftConfig(**SIZES), vocab).bfloat16()
    before = torch.get_rng_state()
    head = bare_head(EagleModule, given.config, vocab, given.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert head.fc.weight.dtype == torch.bfloat16 and head.fc.weight.data_ptr() == given.fc.weight.data_ptr()
    for name, tensor in given.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name
    shapes = {name: tensor.shape for name, tensor in bare_head(EagleModule, given.config).state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in given.state_dict().items()}
