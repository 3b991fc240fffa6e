"""Features of a target equal what the model itself reports, for every family; parity is checked and can fail."""

import pytest
import torch
from target_families import CONFIGS, make_family, make_vision_wrapper

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import Target, load_target
from modelopt_eagle.target.tiny import make_tiny_target


def ids(count=11, batch=2, vocabulary=96):
    return torch.randint(3, vocabulary, (batch, count), generator=torch.Generator().manual_seed(5))  # [B,S]


@pytest.mark.parametrize("family", CONFIGS)
def test_features_equal_the_models_own_hidden_states(family):
    target = Target(make_family(family), None, name=family)
    x = ids()
    own = target.model(x, output_hidden_states=True)
    out = target.features(x, None, (4, 0, 2))
    expected = torch.cat([own.hidden_states[k + 1] for k in (0, 2, 4)], -1)  # [B,S,3*Ht]
    torch.testing.assert_close(out.aux_hidden, expected, rtol=0, atol=0)
    torch.testing.assert_close(out.final_hidden, own.hidden_states[-1], rtol=0, atol=0)
    torch.testing.assert_close(target.logits(out.final_hidden), own.logits, rtol=1e-5, atol=1e-5)
    target.check_parity(x)
    target.check_causal()


def test_nested_text_model_of_a_vision_wrapper():
    target = Target(make_vision_wrapper(), None, name="wrapper")
    assert target.parts.names["backbone"] == "model.language_model"
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 96)
    target.check_parity(ids())


def test_last_layer_is_captured_before_the_final_norm(tiny_target):
    x = ids(vocabulary=247)
    out = tiny_target.features(x, None, (7,))
    torch.testing.assert_close(tiny_target.final_norm(out.aux_hidden), out.final_hidden)
    assert not torch.allclose(out.aux_hidden, out.final_hidden)


def test_features_do_not_run_the_head(tiny_target):
    def explode(*args):
        raise AssertionError("the output head ran")

    handle = tiny_target.parts.head.register_forward_pre_hook(explode)
    try:
        assert tiny_target.features(ids(vocabulary=247)).aux_hidden.shape == (2, 11, 3 * 64)
    finally:
        handle.remove()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_features(side):
    target = Target(make_family("gpt2"), None, name="gpt2")  # absolute positions, so left padding needs its own ids
    x = ids(batch=1)
    plain = target.features(x).final_hidden
    padding = torch.zeros(1, 4, dtype=torch.long)
    first = (padding, x) if side == "left" else (x, padding)
    padded = torch.cat(first, 1)
    mask = torch.cat([torch.zeros_like(padding) if p is padding else torch.ones_like(x) for p in first], 1)
    out = target.features(padded, mask).final_hidden[mask.bool()]
    torch.testing.assert_close(out, plain[0], rtol=1e-5, atol=1e-5)


def test_target_is_frozen_and_embedding_is_the_bare_table():
    target = Target(make_family("gemma3"), None, name="gemma3")
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    x = ids()
    table = target.model.get_input_embeddings().weight
    assert torch.equal(target.embedding(x), table[x])
    assert not torch.allclose(target.parts.embedding(x), table[x])  # the model's own scales by sqrt(Ht)
    assert target.embedding.weight.data_ptr() == table.data_ptr()


def test_head_rows_are_the_weight_of_those_tokens(tiny_target):
    chosen = torch.tensor([5, 0, 200])
    assert torch.equal(tiny_target.head.rows(chosen), tiny_target.model.lm_head.weight[chosen])


@pytest.mark.parametrize("change", ["weight", "scale", "cap"])
def test_parity_fails_when_the_head_is_altered(change):
    target = Target(make_family("gemma2"), None, name="gemma2")
    target.check_parity(ids())
    head = target.head
    changed = {"weight": head.weight.roll(1, 0), "scale": 1.5, "cap": None}[change]
    values = {"weight": head.weight, "scale": head.scale, "cap": head.cap} | {change: changed}
    target.head = type(head)(values["weight"], head.bias, values["scale"], values["cap"])
    with pytest.raises(TargetError, match="teacher parity broken"):
        target.check_parity(ids())


def test_a_backbone_that_changes_the_normed_state_is_refused():
    model = make_family("llama")
    model.model.register_forward_hook(lambda module, args, out: (out[0] * 2,))
    with pytest.raises(TargetError, match="output of its final norm"):
        Target(model, None, name="odd").features(ids())


def test_fewer_than_six_layers_names_the_option(tiny_target):
    from modelopt_eagle.target.tiny import make_tiny_target

    small = make_tiny_target(layers=5)
    with pytest.raises(TargetError, match="eagle.aux_layer_ids"):
        small.features(ids(vocabulary=247))
    assert small.features(ids(vocabulary=247), None, (0, 4)).aux_hidden.shape == (2, 11, 128)
    assert tiny_target.default_aux_layer_ids() == (1, 3, 4)


def test_identity_tells_weights_tokenizers_and_templates_apart(tmp_path):
    from modelopt_eagle.target.tiny import make_tiny_target

    one, same, other = make_tiny_target(), make_tiny_target(), make_tiny_target(seed=1)
    assert one.identity() == same.identity()
    assert one.identity()["revision"] != other.identity()["revision"]
    assert one.identity()["tokenizer_hash"] == other.identity()["tokenizer_hash"]
    other.tokenizer.chat_template += " "
    assert one.identity()["template_hash"] != other.identity()["template_hash"]
    other.tokenizer.add_tokens(["zz"])
    assert one.identity()["tokenizer_hash"] != other.identity()["tokenizer_hash"]
    on_disk = [make_tiny_target(tmp_path / str(seed), seed=seed).identity()["revision"] for seed in (0, 1)]
    assert on_disk[0] != on_disk[1]


def hooked(target, layer, change):
    """The target with the states of a layer changed in place by ``change``."""

    def hook(module, inputs, output):
        change(output[0] if isinstance(output, tuple) else output)

    target.layers[layer].register_forward_hook(hook)
    return target


@pytest.mark.parametrize(("shown", "prefix"), [("token 1 of 12", None), ("token 1 of 12", 3), ("token 11 of 12", -2)])
def test_a_target_whose_states_change_with_later_tokens_is_refused(shown, prefix):
    """Prefix language models: positions are given something of the whole text, or of a few tokens at one end."""

    def look_ahead(states):
        part = states[:, prefix:] if prefix is not None and prefix < 0 else states[:, :prefix]
        part += 0.1 * part.mean(1, keepdim=True)

    make_tiny_target().check_usable()
    with pytest.raises(TargetError, match=f"is not causal: the output of layer 3 at {shown} changes by"):
        hooked(make_tiny_target(), 3, look_ahead).check_usable()


def test_what_cannot_be_run_is_a_line_with_the_model(tmp_path):
    def fails(states):
        raise KeyError("sliding_attention")

    with pytest.raises(TargetError, match="LlamaForCausalLM cannot be run on a few tokens: KeyError: 'sliding_att"):
        hooked(make_tiny_target(), 2, fails).check_usable()
    with pytest.raises(TargetError, match="tiny: layer 2 .*: expected an output of .*one residual stream"):
        target = make_tiny_target()
        target.layers[2].register_forward_hook(lambda module, inputs, output: (torch.zeros(4, 12, 12, 64),))
        target.check_usable()


def test_states_that_are_no_numbers_are_not_called_an_anti_causal_target():
    with pytest.raises(TargetError, match="output of layer 5 is not finite on a few tokens.*torch.float32"):
        hooked(make_tiny_target(), 5, lambda states: states[:, 4].fill_(float("inf"))).check_usable()


def test_every_target_is_checked_when_it_is_loaded(tiny_target_dir, monkeypatch):
    checked = []
    monkeypatch.setattr(Target, "check_causal", lambda self: checked.append(self.name))
    target = load_target(str(tiny_target_dir))
    assert checked == [str(tiny_target_dir)]
    target.check_usable()
    assert len(checked) == 1, "once is enough"
