"""Heads in the folders of other tools: their names, keys and extra tensors, of any size."""

import json

import torch
from safetensors.torch import save_file

TOOLS = ("eagle", "specforge", "modelopt", "speculators")


def layer_keys(config):
    """The decoder layer in a ``config.json``."""
    return {
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "num_hidden_layers": 1, "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size, "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings, "rope_theta": config.rope_theta,
        "rope_scaling": None, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def as_midlayer(state):
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}


def write(folder, tensors, config, kind="safetensors"):
    folder.mkdir()
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
        for file, held in parts.items():
            save_file({name: tensors[name] for name in held}, folder / file)
        index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def foreign(tool, head, folder, kind="safetensors", table=None):
    """Write ``head`` the way ``tool`` does.

    Args:
        table: the target's embedding ``[V, H]``, which SafeAILab's trainer and speculators save along; default random.
    """
    state, ours = dict(head.state_dict()), head.config
    layer, ids = layer_keys(ours), list(ours.aux_layer_ids)
    size = ours.draft_vocab_size
    table = torch.randn(ours.vocab_size, ours.hidden_size) if table is None else table
    if tool == "eagle":  # no ids
        state["embed_tokens.weight"] = table
        config = {**layer, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": size}
        return write(folder, as_midlayer(state), config, kind)
    nested = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    if tool == "specforge":
        config = {
            **layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size, "eagle_config": nested,
            "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "use_cache": True,
        }  # fmt: skip
        return write(folder, as_midlayer(state), config, kind)
    if tool == "modelopt":  # no t2d
        nested.update({
            "next_layer_regular": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
            "use_mtp_layernorm": False, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
            "has_lm_head": True,
        })  # fmt: skip
        config = {
            **layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size, "eagle_config": nested
        }  # fmt: skip
        del state["t2d"]
        return write(folder, state, config, kind)
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": size,
        "norm_before_residual": ours.norm_before_residual, "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "speculators_config": {
            "algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }  # fmt: skip
    state.update({
        "embed_tokens.weight": table, "verifier_norm.weight": torch.ones(ours.hidden_size),
        "verifier_lm_head.weight": torch.randn(size, ours.hidden_size),
    })  # fmt: skip
    return write(folder, state, config, kind)
