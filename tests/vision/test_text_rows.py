"""Vision-language targets with rows of text: the language model's parts, generation, a whole run, what is exported."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.cli import train_and_export
from modelopt_eagle.data import Conversation, Message, prepare_dataset, render, render_text
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.decoding.generator import PlainGenerator
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import TargetError
from modelopt_eagle.export import load_draft
from modelopt_eagle.features import FeatureContract, collate
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.target.load import load_tokenizer
from modelopt_eagle.training.acceptance import acceptance_walk
from tests.training.runs import write_conversations
from tests.vision.tiny_vision import LISTS_ONLY, QWEN, VOCABULARY, make_step, make_tokenizer

AUX = (1, 3, 4)
Row = namedtuple("Row", "id category input_ids supervised")


def test_the_tables_are_the_language_models(target, folders, family):
    names = dict(target.model.named_parameters())
    inner = "model.text_model" if family == "idefics3" else "model.language_model"
    own = names[f"{inner}.embed_tokens.weight"]
    assert torch.equal(target.embedding.weight, own) and own.shape == (VOCABULARY, 32)
    assert target.num_layers == 8 and target.parts.names["layers"] == f"{inner}.layers"
    tables = load_target_tables(folders[family])
    assert torch.equal(tables.embedding_weight, own) and torch.equal(tables.head.weight, names["lm_head.weight"])
    assert torch.equal(tables.final_norm.weight, names[f"{inner}.norm.weight"])
    assert tables.identity() == target.identity()


def test_states_of_text_are_the_models_own(target):
    x = torch.randint(4, 247, (2, 11))
    target.check_parity(x)
    hidden = target.model(input_ids=x, output_hidden_states=True).hidden_states
    states = target.features(x, None, AUX).aux_hidden  # [2,11,3*32]
    torch.testing.assert_close(states, torch.cat([hidden[k + 1] for k in AUX], -1), rtol=1e-5, atol=1e-5)


def test_a_head_has_the_text_models_sizes_and_plain_positions(target):
    config = DraftConfig.from_target(target.model.config)
    assert (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size) == (32, 48, 8, VOCABULARY)
    assert config.rope_scaling is None and config.rope_theta == target.config.rope_parameters["rope_theta"]
    assert config == DraftConfig.from_target(target.config)


def test_sections_of_a_scaled_rotary_embedding_are_left_out():
    from transformers import Qwen2_5_VLTextConfig

    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = DraftConfig.from_target(Qwen2_5_VLTextConfig(
        rope_parameters=rope | {"original_max_position_embeddings": 256}, hidden_size=32, intermediate_size=48,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, vocab_size=256))  # fmt: skip
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert config.rope_theta == 1e6


@pytest.mark.parametrize("template", [LISTS_ONLY, QWEN])
def test_a_template_that_drops_plain_texts_is_given_lists(template):
    tokenizer = make_tokenizer(template)
    talk = Conversation("c", (Message("user", "first?"), Message("assistant", "one")), place="here:1")
    (row,) = render(tokenizer, talk)
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>user\nfirst?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    )
    learned = [token for token, flag in zip(row.input_ids, row.supervised, strict=True) if flag]
    assert tokenizer.decode(learned) == "one<|im_end|>"
    assert "first?" in render_text(tokenizer, talk.messages[:1], add_generation_prompt=True)


def test_rollout_of_text_equals_the_generator(target):
    """The walk over the target's own answers gives the accepted lengths of real drafting, after a few updates."""
    prompts = torch.randint(4, 247, (6, 5)).tolist()
    answers = PlainGenerator(target).generate(prompts, 24, eos_token_id=[]).tokens
    rows = [
        Row(str(i), "", prompt + answer, [False] * 5 + [True] * 24)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    batch = collate(compute_features(target, rows, AUX), FeatureContract.from_target(target, AUX))
    step = make_step(target)
    module = step.module
    optimizer = torch.optim.Adam(module.parameters(), 5e-3)
    for _ in range(40):
        counts = step.count_positions(batch)
        optimizer.zero_grad()
        step(batch, step.normalisers(counts, batch.num_tokens)).loss.backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        walk = acceptance_walk(
            module, step.embed(batch.input_ids), batch.aux_hidden, batch.supervised, batch.target_top1, 3,
            batch.document_ids,
        )  # fmt: skip
        drafted = PseudoSpeculativeGenerator(target, module, num_steps=3).generate(prompts, 24, eos_token_id=[])
    assert drafted.tokens == answers
    assert sum(map(sum, drafted.accepted_lengths)) > 6
    for mine, theirs in zip(walk.accepted, drafted.accepted_lengths, strict=True):
        assert mine[:-2] == theirs[: len(mine) - 2]


def test_a_whole_run_offline_and_online(folders, tmp_path):
    """Online and from a store the same head comes out; it validates, and its export says nothing of M-RoPE."""
    folder, data = folders["qwen2_5_vl"], write_conversations(tmp_path / "rows.jsonl", 8)
    common = ["--base_model", str(folder), "--recipe", "quickstart", "training.epochs=2", "training.batch_size=4",
              "training.time_budget_minutes=null", "training.report_to=none", "eagle.draft_vocab_size=64",
              "validation.num_samples=2", "validation.max_new_tokens=4", "validation.speedup_prompts=0",
              "eagle.init=random", "eagle.draft_vocab_counts=text", "data.cache_features=none"]  # fmt: skip
    online = [*common, "--data", str(data), "--output_dir", str(tmp_path / "online")]
    assert train_and_export.main(online) == 0
    target = load_target(folder)
    rows = prepare_dataset(target.tokenizer, data, max_length=2048, end_token_ids=(2,)).rows
    dump(TargetBackEnd(target), rows, tmp_path / "store", dtype="float32")
    offline = [*common, "--offline_data", str(tmp_path / "store"), "--output_dir", str(tmp_path / "offline")]
    assert train_and_export.main(offline) == 0
    one, two = (load_draft(tmp_path / name) for name in ("online", "offline"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, two.state_dict()[name], rtol=1e-4, atol=1e-5)
    exported = (tmp_path / "online" / "export" / "config.json").read_text()
    assert "mrope" not in exported and json.loads(exported)["rope_theta"] == 1000.0
    assert json.loads((tmp_path / "online" / "report" / "acceptance.json").read_text())["acceptance_length"] >= 1


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_keys_as_published_and_as_in_memory(targets, folders, tmp_path, family):
    """transformers saves these two as they were published; a file with the model's own names means the same tables."""
    published = list(load_file(folders[family] / "model.safetensors"))
    assert not any(key.startswith("model.language_model") for key in published)
    own, folder = targets[family], shutil.copytree(folders[family], tmp_path / family)
    tensors = {key: value.contiguous() for key, value in own.model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tables = load_target_tables(folder)
    assert torch.equal(tables.embedding_weight, own.embedding.weight)
    assert torch.equal(tables.head.weight, own.head.weight)


def test_a_chat_template_of_the_processor_is_read(targets, folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template is None
    template = targets["llava"].tokenizer.chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(folder).chat_template == template
    assert load_tokenizer(folder, chat_template="{{ 1 }}").chat_template == "{{ 1 }}"
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(TargetError, match="expected a JSON object with chat_template"):
        load_tokenizer(folder)
