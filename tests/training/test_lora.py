"""Adapters on the target: gradients by each way, the preservation term, what stays frozen, what is refused."""

import math

import pytest
import torch
from torch import nn

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.conventions import CONVENTIONS
from modelopt_eagle.draft.eagle3.rollout import rollout
from modelopt_eagle.errors import MissingExtraError, RecipeError, TargetError
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.features.unadapted import UnadaptedSource, adapted_batch
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.target.lora import TargetAdapter, attach, find_adapter, merge_adapter
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import loss_plan, preservation
from modelopt_eagle.training.distillation import counted_masks, distillation_loss
from modelopt_eagle.training.preservation import preservation_kl
from modelopt_eagle.training.states import AdaptedStates
from modelopt_eagle.training.step import TeacherTables, TrainingStep

ROWS = [
    TokenizedRow("a", "", list(range(10, 34)), [False] * 8 + [True] * 16, 8),
    TokenizedRow("b", "", list(range(60, 75)), [False] * 5 + [True] * 10, 5),
    TokenizedRow("c", "", list(range(100, 140)), [False] * 20 + [True] * 20, 20),
]
MODULES = ["q_proj", "v_proj", "down_proj"]


def set_b(adapter, scale=0.05):
    """Adapters that change something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter.named.items():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def make(*overrides, first_layer=0):
    """A step with adapters on a tiny target, and a batch of the unadapted one."""
    recipe = load_recipe(None, ["target_lora.rank=4", *overrides])
    target = make_tiny_target()
    adapter = TargetAdapter(target, rank=4, alpha=8, target_modules=MODULES, first_layer=first_layer)
    source = UnadaptedSource(OnlineSource(target, ROWS), adapter)
    module = random_module(DraftConfig.from_target(target.config, 96), DraftVocab.from_counts(torch.arange(256), 96), 0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    step = TrainingStep(module, tables, recipe.eagle, states=AdaptedStates(adapter, recipe.target_lora))
    return step, source.load([0, 1, 2]), source


def gradients(step, batch, **options):
    """Gradients of head and adapters of one micro-batch, and its output."""
    step.zero_grad(set_to_none=True)
    output = step(batch, step.normalisers(step.count_positions(batch), batch.num_tokens), **options)
    output.loss.backward()
    return [p.grad.clone() for p in step.module.parameters()], [p.grad.clone() for p in step.adapters], output


# ---- the teacher's gradient


def transform(logits, ids):
    """Bias, scale and cap of a made-up target."""
    bias = torch.linspace(-1, 1, 48)
    return 5 * torch.tanh((logits + (bias if ids is None else bias[ids])) * 0.8 / 5)


@pytest.mark.parametrize(
    ("convention", "kind"), [("served", "kl"), ("served", "lk"), ("modelopt", "kl"), ("speculators", "kl")]
)
@pytest.mark.parametrize("changes", [None, transform], ids=["plain", "transformed"])
def test_gradient_by_the_teacher_is_that_of_the_formula(convention, kind, changes, monkeypatch):
    monkeypatch.setattr(loss_plan, "CHUNK", 7)
    config = DraftConfig(
        hidden_size=16, target_hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=48, draft_vocab_size=20, aux_layer_ids=(0, 1, 2), max_position_embeddings=64,
        rms_norm_eps=1e-6, rope_theta=1e4,
    )  # fmt: skip
    module = random_module(config, DraftVocab.from_counts(torch.arange(48), 20), 0)
    tokens, aux = torch.randn(2, 12, 16), torch.randn(2, 12, 48)
    supervised = torch.rand(2, 12) < 0.7
    head, hidden = torch.randn(48, 16), torch.randn(2, 12, 16, requires_grad=True)
    output = rollout(module, tokens, aux, 3, supervised=supervised, convention=convention)
    result = distillation_loss(
        output, module, supervised, target_hidden=hidden, target_lm_head=head, convention=convention, loss=kind,
        logit_transform=changes,
    )  # fmt: skip
    result.loss.backward()

    again = hidden.detach().clone().requires_grad_()
    ids = module.target_ids
    logits = (again @ head.T)[..., ids] if changes is None else changes((again @ head.T)[..., ids], ids)
    p_all = logits.flatten(0, 1).softmax(-1)  # [N,Vd]
    rule, total = CONVENTIONS[convention], 0.0
    masks = counted_masks(output.documents, supervised.flatten(), 3, convention, output.rows)
    for k in range(3):
        rows = output.rows[masks[k]]
        log_q = module.lm_head(output.states[k][masks[k]]).log_softmax(-1).detach()
        p = p_all[rows + 1 + k]
        terms = -(p * log_q).sum(-1)
        if rule.subtract_entropy:
            terms = terms + (p * p.log()).sum(-1)
        if kind == "lk":
            share = math.exp(-3 * float(torch.minimum(p, log_q.exp()).sum(-1).mean()))
            terms = share * terms + (1 - share) * 0.5 * (p - log_q.exp()).abs().sum(-1)
        total = total + rule.decay**k * terms.sum() / rule.divisor(masks.sum(1), 24)[k]
    total.backward()
    assert again.grad.abs().sum() > 0
    torch.testing.assert_close(result.loss, total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, again.grad, rtol=1e-4, atol=1e-6)


# ---- the preservation term


@pytest.mark.parametrize("changes", [None, transform], ids=["plain", "transformed"])
def test_preservation_is_the_kl_of_its_formula_in_chunks(changes, monkeypatch):
    monkeypatch.setattr(preservation, "CHUNK_BYTES", 4 * 48 * 5)
    hidden, reference, head = torch.randn(13, 16, requires_grad=True), torch.randn(13, 16), torch.randn(48, 16)
    value = preservation_kl(hidden, reference, head, changes)
    value.backward()
    again = hidden.detach().clone().requires_grad_()
    plain = [x @ head.T if changes is None else changes(x @ head.T, None) for x in (again, reference)]
    log_p, log_p0 = plain[0].log_softmax(-1), plain[1].log_softmax(-1)
    expected = nn.functional.kl_div(log_p, log_p0, reduction="sum", log_target=True)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, again.grad, rtol=1e-4, atol=1e-6)
    assert preservation_kl(reference, reference, head, changes) == 0


def test_no_logits_of_all_positions_exist(monkeypatch):
    from tests.training.test_mode_and_memory import Largest

    monkeypatch.setattr(preservation, "CHUNK_BYTES", 4 * 4096 * 8)
    hidden, head = torch.randn(300, 8, requires_grad=True), torch.randn(4096, 8)
    with Largest() as seen:
        preservation_kl(hidden, torch.randn(300, 8), head).backward()
    assert seen.numel <= 8 * 4096


# ---- the step


def test_fresh_adapters_change_nothing_and_the_preservation_starts_at_zero():
    step, batch, _ = make()
    adapted = adapted_batch(step.states.adapter, batch)
    assert torch.equal(adapted.aux_hidden, batch.aux_hidden) and torch.equal(adapted.final_hidden, batch.final_hidden)
    assert torch.equal(adapted.target_top1, batch.target_top1)
    head, adapters, output = gradients(step, batch, detach=True)
    plain, _, without = gradients(step, batch, adapt=False)
    assert output.preservation == 0 and output.loss == without.loss
    assert all(torch.equal(a, b) for a, b in zip(head, plain, strict=True))
    moved = [name for name, grad in zip(step.states.adapter.named, adapters, strict=True) if grad.abs().sum() > 0]
    # B moves first (A's gradient is a product with B = 0), and only in layers that the head reads
    assert moved and all("lora_B" in name for name in moved)
    assert {int(name.split("layers.")[1].split(".")[0]) for name in moved} == {0, 1, 2, 3, 4}


def test_only_the_adapters_and_the_head_have_gradients():
    step, batch, _ = make(first_layer=2)
    set_b(step.states.adapter)
    gradients(step, batch, detach=False)
    model = step.states.adapter.target.model
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if ".lora_" in name} and len(trained) == 2 * 18
    assert not any("layers.0." in name or "layers.1." in name for name in trained)
    assert not any(module.training for module in model.modules())
    assert step.tables.lm_head.grad is None and not step.tables.lm_head.requires_grad


def test_detaching_the_teacher_takes_away_exactly_its_gradient():
    step, batch, _ = make("target_lora.preservation_weight=0")
    set_b(step.states.adapter)
    head_with, with_teacher, _ = gradients(step, batch, detach=False)
    head_without, without, _ = gradients(step, batch, detach=True)
    assert all(torch.equal(a, b) for a, b in zip(head_with, head_without, strict=True))
    # the teacher's own part: the same loss with the captured states held constant
    adapted = adapted_batch(step.states.adapter, batch)
    step.zero_grad(set_to_none=True)
    norm = step.normalisers(step.count_positions(batch), batch.num_tokens)
    constant = type(adapted)(**{**vars(adapted), "aux_hidden": adapted.aux_hidden.detach()})
    step.loss_of(constant, norm).loss.backward()
    teacher = [torch.zeros_like(p) if p.grad is None else p.grad for p in step.adapters]
    assert sum(g.abs().sum() for g in teacher) > 0
    for both, features, own in zip(with_teacher, without, teacher, strict=True):
        torch.testing.assert_close(both, features + own, rtol=1e-4, atol=1e-6)


def test_preservation_pulls_the_target_back():
    step, batch, _ = make("target_lora.preservation_weight=100")
    set_b(step.states.adapter)
    optimizer = torch.optim.Adam(list(step.adapters), lr=3e-3)
    drifts = []
    for _ in range(25):
        _, _, output = gradients(step, batch, detach=True)
        drifts.append(float(output.preservation))
        optimizer.step()
    assert drifts[0] > 0.01 and drifts[-1] < 0.2 * drifts[0]


def test_recomputed_layers_give_the_same_gradients_and_keep_less():
    kept = []
    for checkpointing in ("false", "true"):
        step, batch, _ = make(f"target_lora.gradient_checkpointing={checkpointing}")
        set_b(step.states.adapter)
        size = 0

        def pack(tensor):
            nonlocal size
            size += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            adapted = adapted_batch(step.states.adapter, batch, checkpointing == "true")
        del adapted
        kept.append((size, gradients(step, batch, detach=False)[1]))
        assert "forward" not in vars(step.states.adapter.target.layers[0])
    assert kept[1][0] < 0.5 * kept[0][0]
    for plain, recomputed in zip(kept[0][1], kept[1][1], strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-7)


def test_the_source_gives_the_unadapted_target_whatever_the_adapters_say():
    step, batch, source = make()
    set_b(step.states.adapter)
    again = source.load([0, 1, 2])
    assert torch.equal(again.aux_hidden, batch.aux_hidden) and torch.equal(again.final_hidden, batch.final_hidden)
    assert not torch.equal(adapted_batch(step.states.adapter, batch).final_hidden, batch.final_hidden)
    assert all(p.requires_grad for p in step.adapters)


def test_choices_depend_on_the_place_alone_and_keep_their_share():
    step, _, _ = make("target_lora.warmup_steps=3", "target_lora.detach_teacher=0.3")
    chosen = [step.options(index, place, 0) for index in range(200) for place in range(3)]
    assert chosen == [step.options(index, place, 0) for index in range(200) for place in range(3)]
    assert [entry["adapt"] for entry in chosen[:12]] == [False] * 9 + [True] * 3
    assert 0.22 < sum(entry["detach"] for entry in chosen) / len(chosen) < 0.38
    for share, expected in (("0", False), ("1", True)):
        step, _, _ = make(f"target_lora.detach_teacher={share}")
        assert all(step.options(index, 0, 0)["detach"] is expected for index in range(50))


def test_a_process_without_a_batch_reaches_every_parameter_with_zero():
    step, _, _ = make()
    output = step(None, torch.ones(3))
    output.loss.backward()
    assert output.loss == 0 and output.preservation == 0
    assert all(p.grad is not None and not p.grad.any() for p in step.parameters())


# ---- the adapter as files


def test_saved_adapter_is_read_by_peft_and_merged(tmp_path):
    import peft

    target = make_tiny_target(tmp_path / "target")
    ids = torch.arange(20, 52)[None]
    plain = target.features(ids).final_hidden
    adapter = TargetAdapter(target, rank=4, alpha=16, target_modules=MODULES, first_layer=3)
    set_b(adapter)
    wanted = target.model(input_ids=ids).logits
    adapter.save(tmp_path / "export" / "target_adapter")
    other = peft.PeftModel.from_pretrained(load_target(tmp_path / "target").model, tmp_path / "export/target_adapter")
    assert torch.equal(other(input_ids=ids).logits, wanted)
    merged = load_target(tmp_path / "target")
    assert merge_adapter(merged, tmp_path) == tmp_path / "export" / "target_adapter"
    torch.testing.assert_close(merged.model(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged.features(ids).final_hidden, plain, atol=1e-2)
    assert isinstance(merged.layers[3].self_attn.q_proj, nn.Linear)
    assert not any(p.requires_grad for p in merged.model.parameters())


def test_seed_and_random_state():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj"], seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    second = TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj"], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_modules_of_another_tower_get_no_adapter(tmp_path):
    """Where a module elsewhere has the same short name, full names are written."""
    target = make_tiny_target()
    target.model.vision = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    adapter = TargetAdapter(target, rank=2, alpha=2, target_modules=["q_proj"], first_layer=6)
    assert isinstance(target.model.vision["q_proj"], nn.Linear)
    assert len(adapter.named) == 4 and all("layers.6." in name or "layers.7." in name for name in adapter.named)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "expected a PEFT folder"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 9), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}'), "expected a LoRA"),
    ],
)
def test_a_damaged_adapter_is_refused(tmp_path, damage, says):
    target = make_tiny_target()
    adapter = TargetAdapter(target, rank=2, alpha=2, target_modules=["q_proj"])
    adapter.save(tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises(TargetError, match=says):
        merge_adapter(make_tiny_target(), tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    adapter = TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj"])
    adapter.save(tmp_path / "adapter")
    with pytest.raises(TargetError, match="another model.*layers.6.*in the file and not in the model"):
        attach(make_tiny_target(layers=6).model, tmp_path / "adapter")
    with pytest.raises(TargetError, match="does not fit LlamaForCausalLM"):
        attach(make_tiny_target(hidden=32, heads=2).model, tmp_path / "adapter")
    with pytest.raises(TargetError, match="other matrices"):
        TargetAdapter(make_tiny_target(), rank=4, alpha=2, target_modules=["q_proj"]).load(adapter.named)
    with pytest.raises(TargetError, match="expected a PEFT folder"):
        find_adapter(tmp_path / "nothing")


def test_an_adapter_that_changes_the_head_is_refused(tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(make_tiny_target().model, config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(TargetError, match="changes .*lm_head.*no part of the decoder layers"):
        merge_adapter(make_tiny_target(), tmp_path)


def test_names_and_layers_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(TargetError, match="no linear module qproj, embed_tokens in layers 0 to 7.*there are down_proj"):
        TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj", "qproj", "embed_tokens"])
    with pytest.raises(TargetError, match="first_layer is 8.*layers 0 to 7"):
        TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj"], first_layer=8)
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e .*\[lora\]"):
        TargetAdapter(make_tiny_target(), rank=2, alpha=2, target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.offline_data_path=a"], "data.offline_data_path: a takes them from before"),
        (["data.streaming_server_url=http://h:1"], "data.streaming_server_url: http://h:1"),
        (["data.cache_features=memory"], "data.cache_features: memory"),
        (["eagle.in_vocab_only=true"], "count positions by the target's choice"),
        (["eagle.convention=eagle"], "count positions by the target's choice"),
        (["eagle.self_logit_distillation=false", "target_lora.detach_teacher=0"], "learns the text"),
        (["target_lora.target_modules=[]"], "expected module names"),
        (["target_lora.target_modules=q_proj,q_proj"], "expected distinct"),
        (["target_lora.rank=0", "target_lora.alpha=8", "target_lora.warmup_steps=2"], "alpha, warmup_steps: read only"),
        (["target_lora.rank=-1"], "greater than or equal to 0"),
        (["target_lora.detach_teacher=1.5"], "less than or equal to 1"),
    ],
)
def test_recipes_that_cannot_be_trained_are_refused(overrides, says):
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, ["target_lora.rank=4", *overrides])
    assert says in str(caught.value)


def test_a_bfloat16_target_keeps_float32_adapters():
    target = make_tiny_target()
    target = type(target)(target.model.bfloat16(), target.tokenizer, name="half")
    adapter = TargetAdapter(target, rank=4, alpha=8, target_modules=MODULES)
    batch = UnadaptedSource(OnlineSource(target, ROWS), adapter).load([0, 1])
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}
    adapted = adapted_batch(adapter, batch)
    assert adapted.final_hidden.dtype == torch.bfloat16 and torch.equal(adapted.final_hidden, batch.final_hidden)
    recipe = load_recipe(None, ["target_lora.rank=4"])
    module = random_module(DraftConfig.from_target(target.config, 96), DraftVocab.from_counts(torch.arange(256), 96), 0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    step = TrainingStep(module, tables, recipe.eagle, states=AdaptedStates(adapter, recipe.target_lora))
    _, grads, output = gradients(step, step.place(batch, "cpu"), detach=False)
    assert torch.isfinite(output.loss) and all(torch.isfinite(g).all() for g in grads)
    assert output.preservation == 0 and any(g.abs().sum() > 0 for g in grads)
