"""Writes a tiny Llama target as a GGUF file, the way llama.cpp's converter does."""

import gguf

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(target, path):
    """Write an untied float32 tiny target with its byte tokenizer to ``path``."""
    config, tokenizer = target.config, target.tokenizer
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += ["zz", "qq"]  # transformers does not read a list of no merges, or of one
    tokens += [f"<unused{i}>" for i in range(len(tokens), config.vocab_size)]
    special = [i < 4 or token.startswith("<unused") for i, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if s else gguf.TokenType.NORMAL for s in special])
    writer.add_token_merges(["z z", "q q"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for key, weight in target.model.state_dict().items():
        array = weight.numpy()
        if "q_proj" in key or "k_proj" in key:  # GGUF stores rotary pairs side by side
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape).copy()
        writer.add_tensor(_name(key), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(key):
    stem = key.removesuffix(".weight")
    if stem in _NAMES:
        return _NAMES[stem] + ".weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"
