"""Muon against the singular value decomposition and a direct formula; groups, decay, learning rates."""

import math

import pytest
import torch

from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.optimizer import Muon, build_optimizers, is_inner_matrix, orthogonalise, set_learning_rate


def small_module(**flags):
    config = DraftConfig(
        hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=60, draft_vocab_size=20, aux_layer_ids=(1, 3, 5), **flags,
    )  # fmt: skip
    return random_module(config, DraftVocab.from_counts(torch.arange(60), 20), seed=1)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)])
def test_orthogonalised_matrix_has_singular_values_near_one_and_the_same_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrix)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.25
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    middle = u.T @ result @ vh.T  # diagonal if the singular vectors are kept
    torch.testing.assert_close(middle, torch.diag(middle.diagonal()), atol=1e-4, rtol=0)
    assert (middle.diagonal() > 0).all()


def test_muon_step_is_the_formula():
    weight = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    before, momentum = weight.detach().clone(), torch.zeros(6, 4)
    optimizer = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.2)
    expected = before.clone()
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 + step))
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        update = orthogonalise(0.1 * gradient + 0.9 * momentum)
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * 0.2 * math.sqrt(6) * update
        torch.testing.assert_close(weight.detach(), expected)


def test_muon_update_is_as_large_as_adamw_s():
    """Root mean square near 0.2, AdamW's, whatever the shape: learning rates carry over."""
    for shape in [(64, 64), (32, 96), (96, 32)]:
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        Muon([weight], lr=1.0).step()
        assert 0.12 < float(weight.detach().square().mean().sqrt()) < 0.25


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_muon_takes_the_matrices_between_embedding_and_head():
    module = small_module(own_embedding=True)
    recipe = load_recipe(None, ["training.optimizer=muon", "training.weight_decay=0.1"])
    muon, adamw = build_optimizers(module, recipe.training)
    names = {id(p): name for name, p in module.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert "fc.weight" in taken and "layers.0.self_attn.q_proj.weight" in taken and len(taken) == 8
    rest = {names[id(p)]: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert rest["lm_head.weight"] == rest["embed_tokens.weight"] == 0.1
    assert rest["norm.weight"] == rest["layers.0.hidden_norm.weight"] == 0.0
    assert taken | set(rest) == set(names.values()) and not taken & set(rest)
    assert not is_inner_matrix("lm_head.weight", module.lm_head.weight)


def test_learning_rate_drives_every_group():
    module = small_module()
    optimizers = build_optimizers(module, load_recipe(None, ["training.learning_rate=0.01"]).training)
    assert set_learning_rate(optimizers, 0.25) == 0.0025
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.0025}
    assert set_learning_rate(optimizers, 1.0) == 0.01


def test_adamw_reads_the_recipe():
    recipe = load_recipe(None, ["training.adam_beta1=0.8", "training.adam_beta2=0.9", "training.weight_decay=0.3"])
    (adamw,) = build_optimizers(small_module(), recipe.training)
    assert all(group["betas"] == (0.8, 0.9) for group in adamw.param_groups)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.0]


def test_muon_has_a_learning_rate_of_its_own():
    recipe = load_recipe(
        None, ["training.optimizer=muon", "training.learning_rate=0.002", "training.muon_learning_rate=0.01"]
    )
    muon, adamw = build_optimizers(small_module(), recipe.training)
    assert set_learning_rate([muon, adamw], 0.5) == 0.005
    assert {group["lr"] for group in adamw.param_groups} == {0.001}
