"""oneDNN's linear layers: equal to ``nn.Linear`` within rounding, lent for the time of a call, shared, never stale."""

import gc
import weakref

import pytest
import torch
from heads import make_head

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, cpu_linear, cpu_product
from modelopt_eagle.decoding.cpu_linear import FastLinears, eligible
from modelopt_eagle.decoding.divergence import first_divergence
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.tiny import make_tiny_target


@pytest.fixture(scope="module")
def wide():
    """A target whose layers are large enough."""
    return make_tiny_target(hidden=256, layers=6)


def forwards(*models):
    return [part for model in models for part in model.modules() if "forward" in part.__dict__]


PACK_ROWS = 4 if cpu_product.packs_for_mkl() else 0


@pytest.fixture(autouse=True, params=[(0, 0, 0), (3, 9, PACK_ROWS)], ids=["oneDNN", "BLAS for few rows"])
def processor(request, monkeypatch):
    """As on a processor where oneDNN takes all products, and as where BLAS takes those of few rows, by blocks and over
    copies too."""
    for name, rows in zip(("BLAS_ROWS", "BLOCK_ROWS", "PACK_ROWS"), request.param, strict=True):
        monkeypatch.setattr(cpu_product, name, rows)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("sizes", [(576, 960), (300, 257), (1536, 576)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_layers_own_forward(pack, sizes, bias):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(*sizes, bias=bias))
    fast, weight = FastLinears(model, pack), model[0].weight.double()
    for shape in ((1,), (2,), (3,), (4,), (1, 5), (2, 4), (9,), (16,), (130,), (2, 1, 3), ()):
        x = torch.randn(*shape, sizes[0])
        exact = torch.nn.functional.linear(x.double(), weight, model[0].bias.double() if bias else None)
        with torch.inference_mode(), fast.use():
            assert forwards(model) == [model[0]]
            found = model(x)
            strided = model(torch.stack((x, x), -1)[..., 1])
        assert found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0)
        torch.testing.assert_close(strided, found, atol=2e-5, rtol=0)
        assert not forwards(model)
    assert fast.packed_bytes == pack * 4 * sizes[0] * sizes[1]


@pytest.mark.parametrize("options", [dict(num_steps=3), dict(mode="tree", topk=3, depth=3, num_nodes=8)], ids=str)
def test_text_is_the_targets_own(wide, options):
    head, prompts = make_head(wide), [[5, 9, 33, 70], [7]]
    assert len(eligible(wide.model)) >= 6 and eligible(head)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        own = wide.model.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
        own = own[0, len(prompt) :].tolist()
        for switch in (True, "auto", False):
            for generator in (
                PseudoSpeculativeGenerator(wide, head, **options, fast_linear=switch),
                PlainGenerator(wide, fast_linear=switch),
            ):
                parted = first_divergence(wide, prompt, own, generator.generate([prompt], 20).tokens[0])
                assert parted is None or parted.is_tie


def test_lent_for_the_call_only_also_after_an_exception(wide):
    head, seen = make_head(wide), []
    generator = PseudoSpeculativeGenerator(wide, head, fast_linear=True)

    def look(index, tokens, reason):
        seen.append(len(forwards(wide.model, head)))
        if len(seen) == 2:
            generator.generate([[1, 2]], 2)  # a call inside a call borrows nothing and takes nothing away
            seen.append(len(forwards(wide.model, head)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([[1, 2, 3]], 8, on_tokens=look)
    assert seen == [len(eligible(wide.model)) + len(eligible(head))] * 3
    assert not forwards(wide.model, head)


def test_layers_with_a_forward_of_their_own_keep_it(wide):
    class Quantised(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), Quantised(256, 256), torch.nn.Linear(8, 8), torch.nn.Linear(256, 256)
    )
    own = model[3].forward = lambda x: x
    model.append(torch.nn.Linear(256, 256, dtype=torch.bfloat16))
    fast = FastLinears(model, True)
    with fast.use():
        assert forwards(model) == [model[0], model[3]] and model[3].forward is own
    assert forwards(model) == [model[3]]


def test_changed_weights_are_read_anew():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    fast, x = FastLinears(model, True), torch.randn(3, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def equal():
        with torch.inference_mode(), fast.use():
            found = model(x)
        torch.testing.assert_close(found, model(x).detach(), atol=2e-5, rtol=0)

    equal()
    packed = fast._packed[model[0],].packed
    equal()
    assert fast._packed[model[0],].packed is packed  # unchanged weights are not packed again
    model(x).square().sum().backward()
    optimizer.step()
    equal()
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})
    equal()
    model[0].weight.data = torch.randn(256, 256) / 16
    equal()
    model[0].weight.data += torch.randn(256, 2) @ torch.randn(2, 256) / 16  # as an adapter is merged: not counted
    equal()


def test_a_packed_weight_is_held_so_that_no_other_gets_its_address():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    fast, memory = FastLinears(model, True), weakref.ref(model[0].weight.untyped_storage())
    with fast.use():
        pass
    model[0].weight = None
    assert memory() is not None
    del fast
    gc.collect()
    assert memory() is None


def test_weights_that_a_hook_computes_are_left_alone():
    from torch.nn.utils import prune

    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    prune.random_unstructured(model[0], "weight", 0.5)
    assert eligible(model) == []


def test_gradients_take_the_layers_own_forward():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    with FastLinears(model, True).use():
        model(torch.randn(2, 256)).sum().backward()
    assert model[0].weight.grad is not None


def test_copies_are_shared_and_go_with_their_users(wide):
    head = make_head(wide)
    one, other = PlainGenerator(wide, fast_linear=True), PseudoSpeculativeGenerator(wide, head, fast_linear=True)
    one.generate([[1, 2]], 3)
    other.generate([[1, 2]], 3)
    assert one._fast[0] is other._fast[0]
    gc.collect()
    assert cpu_linear._SHARED[wide.model]() is one._fast[0]
    del one, other
    gc.collect()
    assert cpu_linear._SHARED[wide.model]() is None


def test_auto_copies_only_into_free_memory(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    need = 2 * 4 * 256 * 256
    for free, pack in ((need, True), (need - 1, False), (0, False)):
        monkeypatch.setattr(cpu_linear, "free_memory", lambda free=free: free)
        assert FastLinears.shared(model, "auto").pack is pack
    assert FastLinears.shared(model, True).pack
    assert FastLinears.shared(model, False) is None
    assert FastLinears.shared(torch.nn.Sequential(torch.nn.Linear(8, 8)), "auto") is None
    monkeypatch.setattr(cpu_linear, "available", lambda: False)
    assert FastLinears.shared(model, True) is None
    monkeypatch.undo()
    assert cpu_linear.free_memory() > 1 << 20


def test_unknown_switch(wide):
    with pytest.raises(DecodingError, match="fast_linear must be \"auto\", True or False, found 'packed'"):
        PlainGenerator(wide, fast_linear="packed")


def test_weights_that_do_not_count_changes_are_read_as_they_lie():
    with torch.inference_mode():
        model, x = torch.nn.Sequential(torch.nn.Linear(256, 256)), torch.randn(3, 256)
        fast = FastLinears(model, True)
        for _ in range(2):
            with fast.use():
                torch.testing.assert_close(model(x), torch.nn.functional.linear(x, *model[0].parameters()))
            model[0].weight.mul_(2)
    assert fast.packed_bytes == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [96, 960, 64, 256, 144])
def test_a_product_by_blocks_is_the_product(out, bias):
    layer = torch.nn.Linear(80, out, bias=bias)
    assert out % cpu_product.block_rows(layer.weight) == 0
    for rows in (1, 4, 9):
        x = torch.randn(rows, 80)
        found = cpu_product.by_blocks(x, layer.weight.detach(), layer.bias)
        torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-5)
    assert cpu_product.block_rows(torch.zeros(100, 8)) == cpu_product.block_rows(torch.zeros(8, 96).t()) == 0


@pytest.mark.skipif(not PACK_ROWS, reason="this build of PyTorch lays nothing out for MKL")
@pytest.mark.parametrize("bias", [True, False])
def test_rows_that_mkl_laid_out_a_copy_for_read_nothing_else(bias, monkeypatch):
    """MKL's operator reads the weight itself, without a word, for other numbers of rows than it is told."""
    monkeypatch.setattr(cpu_product, "PACK_ROWS", PACK_ROWS)
    layer, x = torch.nn.Linear(80, 96, bias=bias), torch.randn(9, 80)
    with torch.inference_mode():
        own = layer(x)
        product = cpu_product.Product([layer], cpu_product.Packed.of([layer.weight.detach()]))
        layer.weight.zero_()
        zeros = layer(x)
        for rows in (1, 3, PACK_ROWS, 5, 9):
            torch.testing.assert_close(
                product(x[:rows]), (own if rows == PACK_ROWS else zeros)[:rows], atol=1e-5, rtol=1e-5
            )
