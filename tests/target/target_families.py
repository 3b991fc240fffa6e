"""Small random models of the families that the target room must understand, built from transformers' own configs."""

import torch
import transformers

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_NO_GQA = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **_EXPERTS),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "phi": lambda: transformers.PhiConfig(**_NO_GQA),
    "olmo": lambda: transformers.OlmoConfig(**_NO_GQA),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_NO_GQA),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=6, n_head=4, n_positions=128),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=6, num_attention_heads=4, word_embed_proj_dim=32
    ),
}


def make_family(name):
    """A random float32 model of a family, with larger weights and biases than the init gives."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    return spread(model)


@torch.no_grad()
def spread(model):
    """Give every tensor of a model values that matter: biases and norms away from 0 and 1."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_vision_wrapper():
    """A Gemma 3 vision-language model with a text model nested inside and a tied head."""
    torch.manual_seed(3)
    text = transformers.Gemma3TextConfig(**SIZES, query_pre_attn_scalar=8).to_dict()
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    return spread(transformers.Gemma3ForConditionalGeneration(config).float().eval())
