"""The memory that a run on a GPU is said to need: what the kernels' way gives and keeps, by hand."""

import contextlib
import logging

import pytest
import torch
from torch import nn

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.common.allocations import Allocations, Shapes
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.draft.attention import QueryPlan, column_attention
from modelopt_eagle.draft.layers import DecoderLayer
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.features.unadapted import UnadaptedSource
from modelopt_eagle.kernels.dispatch import as_on_gpu
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.lora import TargetAdapter
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import memory
from modelopt_eagle.training.optimizer import build_optimizers
from modelopt_eagle.training.states import AdaptedStates
from modelopt_eagle.training.step import TeacherTables, TrainingStep
from tests.training.runs import write_conversations

N, H, INNER, HEADS, GROUPS, D = 300, 64, 96, 4, 2, 16
BF16, F32 = 2, 4


@pytest.fixture
def shapes():
    """Hollow tensors, as on a GPU."""
    with as_on_gpu(), memory.AsOnCuda(), Shapes() as found:
        yield found


def test_attention_keeps_its_inputs_its_output_and_a_number_a_query_and_head(shapes):
    columns, tokens = 3, 400
    sizes = [(N, HEADS, D), (tokens, GROUPS, D), (tokens, GROUPS, D), (N, columns, GROUPS, D), (N, columns, GROUPS, D)]
    tensors = [shapes.empty(*size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    plan = QueryPlan.make(torch.arange(N), torch.zeros(N, dtype=torch.int64))
    plan.askers(tokens)  # made once for all layers and steps
    before = shapes.now
    out = column_attention(*tensors, plan, 1.0)
    assert shapes.now - before == N * HEADS * (D * BF16 + F32)
    shapes.forget_peak()
    out.sum().backward()
    given = sum(tensor.numel() for tensor in tensors)
    assert shapes.peak - before <= N * HEADS * (D * BF16 + F32) + BF16 * (given + N * HEADS * D) + 8
    del out
    assert shapes.now - before == BF16 * given  # the gradients


def test_a_layer_keeps_what_was_counted_by_hand(shapes):
    config = DraftConfig(
        hidden_size=H, target_hidden_size=H, intermediate_size=INNER, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=D, vocab_size=48, draft_vocab_size=20, aux_layer_ids=(0, 1, 2),
        max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    with torch.device("meta"):
        layer = DecoderLayer(config, 0)
    shapes.fill(layer, torch.float32)
    embedding, state = shapes.empty(N, H), shapes.empty(N, H, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = shapes.empty(N, D // 2), shapes.empty(N, D // 2)
    own = [shapes.empty(N, 0, GROUPS, D, dtype=torch.bfloat16) for _ in range(2)]
    plan = QueryPlan.make(torch.arange(N), torch.zeros(N, dtype=torch.int64))
    plan.askers(N)
    before = shapes.now
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v, residual = layer.project(embedding, state, cos, sin)
        attended = column_attention(q, k, v, *own, plan, layer.scale)
        out = layer.combine(attended.flatten(-2), residual)
        matrices = BF16 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)  # autocast's copies
        del q, k, v, attended
        kept = {
            "wide input": 2 * H * BF16,
            "two norms": 2 * F32,
            "q, k and v": (HEADS + 2 * GROUPS) * D * BF16,
            "attention": HEADS * (D * BF16 + F32),
            "norm behind it": H * F32 + F32,  # its input in float32, as autocast wants it
            "inputs of gate and up": 2 * H * BF16,
            "gate, up, both activations": 4 * INNER * BF16,
            "output": H * BF16,
        }
        assert shapes.now - before == matrices + N * sum(kept.values())
    del out, residual


def test_autocast_has_the_dtypes_of_cuda(shapes):
    norm, x = nn.RMSNorm(8), torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.float32 and x.softmax(-1).dtype == torch.float32 == x.exp().dtype
        assert nn.functional.silu(x).dtype == torch.bfloat16 == (x @ x.T).dtype
    assert x.softmax(-1).dtype == torch.bfloat16


def test_norms_are_torchs():
    x, weight = torch.randn(3, 2, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    found = []
    for mode in (contextlib.nullcontext(), memory.AsOnCuda()):
        with mode:
            out = nn.functional.rms_norm(x, (8,), weight, 1e-3)
        found.append((out, *torch.autograd.grad(out, (x, weight), torch.arange(48.0).view(3, 2, 8))))
    torch.testing.assert_close(*found)


@pytest.fixture(scope="module")
def sizes():
    """The configuration of a tiny target."""
    return make_tiny_target(hidden=32, vocab=1024, layers=6, heads=2, kv_heads=1, intermediate=64).config


def test_a_gpu_has_no_chunks_of_scores(sizes):
    recipe = load_recipe(None, ["eagle.draft_vocab_size=256", "data.offline_data_path=store"])
    head = find_algorithm("eagle3").head_config(recipe, sizes, 256, None)
    cpu, gpu, twice = (
        memory.estimate_peak(recipe, sizes, head, ((200, 100),) * rows, device=device)
        for device, rows in (("cpu", 2), ("cuda", 2), ("cuda", 4))
    )
    assert (cpu.target, cpu.head, cpu.features) == (gpu.target, gpu.head, gpu.features)
    assert cpu.scratch != gpu.scratch
    assert twice.scratch == pytest.approx(2 * gpu.scratch, rel=0.15)  # nothing is as large as tokens by tokens


LORA = ["target_lora.rank=4", "target_lora.target_modules=[q_proj,v_proj,down_proj]"]


@pytest.mark.parametrize("options", [[], ["target_lora.detach_teacher=1.0", "target_lora.gradient_checkpointing=true"]])
def test_adapters_of_the_target_are_counted(options):
    target = make_tiny_target(hidden=32, vocab=1024, layers=6, heads=2, kv_heads=1, intermediate=64, max_positions=4096)
    recipe = load_recipe(None, ["eagle.draft_vocab_size=256", *LORA, *options])
    algorithm = find_algorithm("eagle3")
    config = algorithm.head_config(recipe, target.model.config, 256, None)
    shape = ((100, 50), (100, 60))
    found = memory.estimate_peak(recipe, target.model.config, config, shape)
    gpu = memory.estimate_peak(recipe, target.model.config, config, shape, device="cuda")
    assert gpu.unknown is None and (gpu.head, gpu.target) == (found.head, found.target)
    with Allocations() as counted:
        for tensor in (*target.model.parameters(), *target.model.buffers()):
            counted.add(tensor)
        lora = recipe.target_lora
        adapter = TargetAdapter(target, rank=4, alpha=lora.alpha, target_modules=lora.target_modules)
        source = UnadaptedSource(OnlineSource(target, memory.tokenised(shape)), adapter)
        module = algorithm.module(config, None)
        module.set_vocab(memory.DraftVocab.from_counts(torch.zeros(1024), 256))
        tables = TeacherTables.make(target.embedding_weight, target.head, module.target_ids)
        step = TrainingStep(module, tables, recipe.eagle, states=AdaptedStates(adapter, lora))
        optimizers = build_optimizers(module, recipe.training, list(step.adapters), lora.learning_rate)
        for _ in range(2):
            batch = step.place(step.share(source.load([0, 1])), "cpu")
            norm = step.normalisers(step.count_positions(batch), batch.num_tokens)
            step(batch, norm, adapt=True, detach=lora.detach_teacher >= 1).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            del batch
    assert found.unknown is None and found.total == pytest.approx(counted.peak, rel=0.15)
    plain = memory.estimate_peak(load_recipe(None, ["eagle.draft_vocab_size=256"]), target.model.config, config, shape)
    size = sum(parameter.numel() for parameter in adapter.parameters())
    assert found.head - plain.head == pytest.approx(16 * size, rel=0.02)


def test_the_command_takes_the_way_of_the_device_that_is_meant(tiny_target_dir, tmp_path, monkeypatch):
    data, meant = write_conversations(tmp_path / "rows.jsonl", 4), []
    real = memory.estimate_peak
    monkeypatch.setattr(memory, "estimate_peak", lambda *a, device, **k: meant.append(device) or real(*a, **k))
    command = ["--base_model", str(tiny_target_dir), "--data", str(data), "--gflops", "1", "--memory", "1"]
    for device in ("cpu", "cuda"):
        assert run_command("estimate", [*command, "eagle.draft_vocab_size=64", f"model.device={device}"]) == 0
    assert meant == ["cpu", "cuda"]


def test_what_a_forward_does_not_say_of_hollow_tensors_is_told_once(sizes, monkeypatch, caplog):
    def refuses(target, rows, layers):  # as Jamba's experts do over hollow tensors of float32
        return target.embedding_weight @ target.embedding_weight

    recipe = load_recipe(None, ["eagle.draft_vocab_size=256"])
    head = find_algorithm("eagle3").head_config(recipe, sizes, 256, None)
    monkeypatch.setattr(memory, "compute_features", refuses)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # torch's loggers pass nothing on
    log.addHandler(caplog.handler)
    try:
        found = memory.estimate_peak(recipe, sizes, head, ((20, 10),), device="cuda")
    finally:
        log.removeHandler(caplog.handler)
    assert found.unknown is not None and "1024" in found.unknown and found.line().endswith(found.unknown)
    assert not caplog.records and not log.disabled
