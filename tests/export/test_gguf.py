"""A head as llama.cpp's GGUF file: its keys and numbers by the reader of the ``gguf`` package, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.rotary import Rotary
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import convert_checkpoint, export_checkpoint
from modelopt_eagle.export.gguf import NAMES, check_written, export_gguf, gguf_fields, gguf_reasons, read_gguf_head
from modelopt_eagle.target.gguf import gguf_file_of, quickstart_file
from modelopt_eagle.target.to_gguf import by_pair
from tests.export.conftest import LATENT, SIZES, build_head, stand_in_tables

PLAIN = {
    "fc.weight", "output_norm.weight", "output.weight", "d2t", "blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight",
    "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight", "blk.0.attn_output.weight",
    "blk.0.ffn_norm.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight",
}  # fmt: skip
"""What ``src/models/eagle3.cpp`` asks for of every head with a reduced vocabulary."""


def converted(head, tmp_path, **options):
    export_checkpoint(head, None, tmp_path / "head")
    return convert_checkpoint(tmp_path / "head", tmp_path / "gguf", "gguf", **options)


def target_gguf(path, tokens=64, mask=None):
    """The tokenizer's part of a target's file."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    if mask is not None:
        writer.add_mask_token_id(mask)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((tokens, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_file_holds_what_the_engine_asks_for(tmp_path):
    head = build_head()
    report = converted(head, tmp_path)
    assert {entry.name for entry in report.path.iterdir()} == {"draft.gguf", "README.md"}
    fields, tensors = read_gguf_head(report.path / "draft.gguf")
    assert set(tensors) == PLAIN and report.tensors == len(PLAIN) and report.dtype == "float32"
    assert report.bytes == (report.path / "draft.gguf").stat().st_size
    wanted = {
        "general.architecture": "eagle3", "general.file_type": 0, "eagle3.vocab_size": 64,
        "eagle3.context_length": 2048, "eagle3.embedding_length": 32, "eagle3.block_count": 1,
        "eagle3.feed_forward_length": 48, "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8, "eagle3.attention.value_length": 8, "eagle3.rope.dimension_count": 8,
        "eagle3.rope.freq_base": 5e4, "eagle3.rope.scaling.type": "none", "eagle3.target_layers": [2, 4, 5],
        "eagle3.target_hidden_size": 32, "eagle3.norm_before_residual": False, "eagle3.norm_before_fc": False,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted
    assert fields["tokenizer.ggml.tokens"] == [f"t{n}" for n in range(64)]
    assert fields["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    state = head.state_dict()
    for own, name in NAMES.items():
        if own in state and "_proj" not in own:
            assert torch.equal(tensors[name], state[own]), own
    for part in ("v", "o"):
        name = {"v": "blk.0.attn_v.weight", "o": "blk.0.attn_output.weight"}[part]
        assert torch.equal(tensors[name], state[f"layers.0.self_attn.{part}_proj.weight"])
    for part in ("gate", "up", "down"):
        assert torch.equal(tensors[f"blk.0.ffn_{part}.weight"], state[f"layers.0.mlp.{part}_proj.weight"])
    assert tensors["d2t"].dtype == torch.int64 and torch.equal(tensors["d2t"], head.vocab.target_ids)  # not offsets
    raw = {entry.name: entry.tensor_type.name for entry in GGUFReader(report.path / "draft.gguf").tensors}
    assert raw["d2t"] == "I64" and {kind for name, kind in raw.items() if name != "d2t"} == {"F32"}


def test_queries_and_keys_rotate_neighbours(tmp_path):
    """Rotated in neighbouring pairs, the file's rows give the scores that ours give in halves."""
    head = build_head()
    tensors = read_gguf_head(converted(head, tmp_path).path / "draft.gguf")[1]
    x = torch.randn(5, 64)  # [S,2H]
    cos, sin = Rotary(head.config)(torch.arange(5))  # [S,d/2]
    cos, sin = cos[:, None], sin[:, None]

    def halves(rows, heads):
        a, b = rows.unflatten(-1, (heads, 8)).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def pairs(rows, heads):
        rows = rows.unflatten(-1, (heads, 8))
        a, b = rows[..., 0::2], rows[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    attention = head.state_dict()
    ours = [halves(x @ attention[f"layers.0.self_attn.{p}_proj.weight"].T, n) for p, n in (("q", 4), ("k", 2))]
    theirs = [pairs(x @ tensors[f"blk.0.attn_{p}.weight"].T, n) for p, n in (("q", 4), ("k", 2))]
    scores = [torch.einsum("shd,tgd->hgst", *each) for each in (ours, theirs)]
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.equal(ours[0], theirs[0])
    assert by_pair(torch.arange(8.0)[:, None], 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_take_the_dtype_and_norms_stay_in_float32(tmp_path, dtype):
    head = build_head()
    report = converted(head, tmp_path, dtype=dtype)
    fields, tensors = read_gguf_head(report.path / "draft.gguf")
    assert fields["general.file_type"] == {"bfloat16": 32, "float16": 1}[dtype]
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int64 if name == "d2t" else getattr(torch, dtype) if tensor.dim() > 1 else
                                torch.float32), name  # fmt: skip
    assert torch.equal(tensors["output.weight"], head.lm_head.weight.detach().to(getattr(torch, dtype)))
    norm = head.norm.weight.detach().to(getattr(torch, dtype)).float()  # the source was cast when it was read
    assert torch.equal(tensors["output_norm.weight"], norm)


def test_flags_own_embedding_and_a_full_vocabulary(tmp_path):
    head = build_head(
        target_hidden_size=48, norm_before_residual=True, norm_before_fc=True, draft_vocab_size=64, head_dim=16
    )
    fields, tensors = read_gguf_head(converted(head, tmp_path).path / "draft.gguf")
    assert set(tensors) == PLAIN - {"d2t"} | {"token_embd.weight", "enc.output_norm.weight"}
    assert torch.equal(tensors["enc.output_norm.weight"], head.input_norm.weight.detach())
    assert torch.equal(tensors["token_embd.weight"], head.embed_tokens.weight.detach())
    assert fields["eagle3.norm_before_residual"] is True and fields["eagle3.norm_before_fc"] is True
    assert fields["eagle3.attention.key_length"] == 16 and fields["eagle3.target_hidden_size"] == 48


SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_a_scaled_rotary_table_is_written_as_divisors_of_the_plain_one(tmp_path, scaling):
    head = build_head(rope_scaling=scaling)
    fields, tensors = read_gguf_head(converted(head, tmp_path).path / "draft.gguf")
    plain = 5e4 ** -(torch.arange(0, 8, 2).float() / 8)
    rotary = Rotary(head.config)
    torch.testing.assert_close(plain / tensors["rope_freqs.weight"], rotary.frequencies)
    assert fields.get("eagle3.rope.scaling.attn_factor", 1.0) == pytest.approx(rotary.factor)
    assert fields["eagle3.rope.scaling.type"] == "none"
    assert (rotary.factor != 1.0) == (scaling["rope_type"] == "yarn")


def test_the_targets_file_gives_the_tokenizer(tmp_path):
    file = target_gguf(tmp_path / "target.gguf")
    fields, _ = read_gguf_head(converted(build_head(), tmp_path, target_file=file).path / "draft.gguf")
    own, _ = read_gguf_head(file)
    told = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
    assert told == {key: value for key, value in own.items() if key.startswith("tokenizer.ggml.")} and len(told) == 7
    with pytest.raises(ExportError, match="has 63 tokens, the head is one for 64"):
        convert_checkpoint(
            tmp_path / "head", tmp_path / "other", "gguf", target_file=target_gguf(tmp_path / "63.gguf", 63)
        )
    assert not (tmp_path / "other").exists()


def test_which_names_stand_for_a_file(tmp_path):
    assert gguf_file_of("quickstart") == quickstart_file() and gguf_file_of("/x/y.gguf").name == "y.gguf"
    assert gguf_file_of("HuggingFaceTB/SmolLM2-135M-Instruct") is None and gguf_file_of(tmp_path) is None


REFUSED = [
    ({"algorithm": "peagle", "mask_token_id": 63}, "serves no P-EAGLE heads"),
    ({"algorithm": "medusa", "aux_layer_ids": (7,)}, "serves no Medusa heads"),
    (LATENT, "heads of llama layers, this one has kimik2 layers"),
    ({"qk_norm": True}, "heads of llama layers, this one has qwen3 layers"),
    ({"num_hidden_layers": 2}, "serves heads of one layer, this one has 2"),
    ({"aux_layer_ids": (2, 5)}, "serves heads of 3 captured layers, this one reads 2"),
    ({"attention_bias": True}, "has no attention bias"),
    ({"mlp_bias": True}, "has no bias in the feed-forward part"),
    ({"fc_norm": True}, "has no fc_norm"),
    ({"norm_output": True}, "has no norm_output"),
    ({"sliding_window": 16}, "lets a query see everything before"),
    ({"last_norm": False}, "norms the output before lm_head"),
    ({"embedding_norm": False}, "norms the token embedding"),
    ({"hidden_act": "gelu"}, "computes silu, the head was trained with gelu"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_head_that_it_would_compute_otherwise_is_refused_by_name(tmp_path, overrides, reason):
    head = build_head(**overrides)
    assert any(reason in given for given in gguf_reasons(head.config)), gguf_reasons(head.config)
    with pytest.raises(ExportError, match=f"llama.cpp 10894 would not serve this head as trained: .*{reason}"):
        converted(head, tmp_path)
    assert not (tmp_path / "gguf").exists()


def blocks(**overrides):
    """A DFlash head of two layers; its norms are no ones."""
    sizes = {**SIZES, "num_hidden_layers": 2, "block_size": 4, "mask_token_id": 63, "draft_vocab_size": 64, **overrides}
    config = DFlashConfig.from_dict(sizes)
    size = config.draft_vocab_size
    vocab = DraftVocab.identity(64) if size == 64 else DraftVocab.from_target_ids(torch.arange(size) * 2, 64)
    head = random_module(config, vocab, seed=0)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return head


def test_a_dflash_head_as_its_graph_asks_for(tmp_path):
    """``src/models/dflash.cpp``: tensors by layer, rows in halves, the mask token and the order of a block as keys."""
    head = blocks(draft_vocab_size=16, causal=True, aux_layer_ids=(1, 5))
    report = converted(head, tmp_path, target_file=target_gguf(tmp_path / "target.gguf"))
    fields, tensors = read_gguf_head(report.path / "draft.gguf")
    wanted = {
        "general.architecture": "dflash", "dflash.block_count": 2, "dflash.target_layers": [2, 6],
        "dflash.block_size": 4, "dflash.attention.causal": True, "tokenizer.ggml.mask_token_id": 63,
        "dflash.embedding_length": 32, "dflash.attention.key_length": 8, "dflash.rope.dimension_count": 8,
        "dflash.rope.freq_base": 5e4, "dflash.rope.scaling.type": "none", "tokenizer.ggml.pre": "smollm",
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted and not any(key.startswith("eagle3") for key in fields)
    state, layer = head.state_dict(), {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    names = {f"blk.{n}.{told}.weight": f"layers.{n}.{own}.weight" for n in range(2) for told, own in layer.items()}
    names |= {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight",
              "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight"}  # fmt: skip
    assert set(tensors) == {*names, "d2t"} and torch.equal(tensors["d2t"], torch.arange(16) * 2)
    assert all(torch.equal(tensors[told], state[own]) for told, own in names.items())
    card = (report.path / "README.md").read_text()
    assert "--spec-type draft-dflash --spec-draft-n-max 3" in card


def test_a_shared_output_layer_and_the_targets_mask_are_left_out(tmp_path):
    head = blocks(shares_head=True)
    fields, tensors = read_gguf_head(converted(head, tmp_path).path / "draft.gguf")
    assert not {"output.weight", "token_embd.weight", "d2t"} & set(tensors)
    assert fields["dflash.attention.causal"] is False and fields["tokenizer.ggml.mask_token_id"] == 63
    file = target_gguf(tmp_path / "target.gguf", mask=5)
    again = convert_checkpoint(tmp_path / "head", tmp_path / "again", "gguf", target_file=file)
    assert read_gguf_head(again.path / "draft.gguf")[0]["tokenizer.ggml.mask_token_id"] == 63


BLOCKS_REFUSED = [
    ({"attention_bias": True}, "has no attention bias"),
    ({"mlp_bias": True}, "has no bias in the feed-forward part"),
    ({"target_hidden_size": 48}, "takes features as wide as the head"),
    ({"hidden_act": "gelu"}, "computes silu, the head was trained with gelu"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "this one's are scaled"),
    ({"shares_head": True, "draft_vocab_size": 16}, "its rows for a reduced vocabulary"),
]


@pytest.mark.parametrize(("overrides", "reason"), BLOCKS_REFUSED, ids=[reason for _, reason in BLOCKS_REFUSED])
def test_a_dflash_head_that_it_would_compute_otherwise_is_refused(tmp_path, overrides, reason):
    head = blocks(**overrides)
    with pytest.raises(ExportError, match=f"llama.cpp 10894 would not serve this head as trained: .*{reason}"):
        export_gguf(head, tmp_path / "gguf", dtype=torch.float32)
    assert not (tmp_path / "gguf").exists() and gguf_reasons(blocks().config) == []
    assert "last layer (7)" in gguf_reasons(blocks(aux_layer_ids=(1, 7)).config, 8)[0]


def test_the_last_layer_of_the_target_is_refused_where_the_depth_is_known(tmp_path):
    head = build_head(aux_layer_ids=(1, 3, 7))
    export_checkpoint(head, None, tmp_path / "head")
    tables = stand_in_tables(head.config)
    with pytest.raises(ExportError, match=r"does not capture the output of the target's last layer \(7\)"):
        convert_checkpoint(tmp_path / "head", tmp_path / "gguf", "gguf", target=tables)
    assert gguf_reasons(head.config, 12) == [] == gguf_reasons(build_head().config)


def test_a_file_that_reads_back_otherwise_is_not_kept(tmp_path):
    head = build_head()
    file = converted(head, tmp_path).path / "draft.gguf"
    fields, tensors = gguf_fields(head.config, torch.float32), read_gguf_head(file)[1]
    check_written(file, fields, tensors)
    with pytest.raises(ExportError, match="tensor fc.weight reads back differently"):
        check_written(file, fields, {**tensors, "fc.weight": tensors["fc.weight"] + 1e-7})
    with pytest.raises(ExportError, match="other tensors than were written"):
        check_written(file, fields, {n: t for n, t in tensors.items() if n != "d2t"})
    other = gguf_fields(dataclasses.replace(head.config, aux_layer_ids=(1, 2, 4)), torch.float32)
    with pytest.raises(ExportError, match=r"eagle3.target_layers was written as \[2, 3, 5\]"):
        check_written(file, other, tensors)


def test_the_command_writes_a_folder_that_can_be_replaced(tmp_path, capsys):
    export_checkpoint(build_head(), None, tmp_path / "head")
    given = ["--input", str(tmp_path / "head"), "--output", str(tmp_path / "out"), "--to", "gguf"]
    assert run_command("convert_checkpoint", given) == 0
    assert "14 tensors, float32" in capsys.readouterr().out
    card = (tmp_path / "out/README.md").read_text()
    assert "-md THIS_FOLDER/draft.gguf --spec-type draft-eagle3" in card and "vllm" not in card.lower()
    assert run_command("convert_checkpoint", given) == 2 and "pass --overwrite" in capsys.readouterr().err
    assert run_command("convert_checkpoint", [*given, "--overwrite"]) == 0
    (tmp_path / "out/notes.txt").touch()
    assert run_command("convert_checkpoint", [*given, "--overwrite"]) == 2
    assert "holds files that no export writes" in capsys.readouterr().err


def test_kinds_of_values_are_those_that_the_engine_reads(tmp_path):
    reader = GGUFReader(converted(build_head(), tmp_path).path / "draft.gguf")
    kinds = {key: field.types for key, field in reader.fields.items() if key.startswith("eagle3.")}
    assert kinds.pop("eagle3.target_layers") == [GGUFValueType.ARRAY, GGUFValueType.INT32]
    assert kinds.pop("eagle3.norm_before_fc") == kinds.pop("eagle3.norm_before_residual") == [GGUFValueType.BOOL]
    assert kinds.pop("eagle3.rope.scaling.type") == [GGUFValueType.STRING]
    floats = {key for key, types in kinds.items() if types == [GGUFValueType.FLOAT32]}
    assert floats == {"eagle3.rope.freq_base", "eagle3.attention.layer_norm_rms_epsilon"}
    assert all(types == [GGUFValueType.UINT32] for key, types in kinds.items() if key not in floats)
