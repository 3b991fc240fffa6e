"""A head in int8, quantised by our command's own function and served by a real vLLM."""

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.export import load_draft
from modelopt_eagle.export.quantize import feed, quantize_drafter
from modelopt_eagle.features import OfflineSource
from tests.engine.heads import DEFAULT

TOLERANCE = 0.02
"""The engine rounds a token's numbers in an order of its own, so a few of them fall to the other side."""


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(),
    reason="on a CPU with AMX, vLLM 0.32 takes an int8 kernel that refuses float32 activations",
)
def test_the_engine_serves_an_int8_head_as_it_computes(head, check, target, stores, tmp_path):
    source = OfflineSource(stores[DEFAULT], final_norm=target.final_norm, head=target.head)
    batches = list(source.batches(0, batch_size=1, seed=0, shuffle=False))[:6]
    plain = load_draft(head("plain").export)
    quantize_drafter(plain, tmp_path / "int8", "int8", feed(batches, target.embedding, 3), target=target)
    kinds = {str(tensor.dtype) for tensor in load_file(tmp_path / "int8/model.safetensors").values()}
    assert "torch.int8" in kinds
    report = check.check(tmp_path / "int8", tolerance=TOLERANCE)
    print("\nint8\n" + report.table())
    assert report.passed, report.table()
    assert report.our_per_position[0] > 0.1 and report.drafts > 100
