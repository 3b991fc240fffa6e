"""Tiny random vision-language targets with a byte tokenizer and a processor, saved as a user would find them."""

import json

import torch
import transformers

from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import SPECIAL_TOKENS, make_byte_tokenizer
from modelopt_eagle.training.step import TeacherTables, TrainingStep

PAD, IMAGE, VIDEO, BEGIN, END = "<pic>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TILES = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TILES += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
VOCABULARY = 272
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, patch_size=14)

LISTS_ONLY = (  # LLaVA's: a plain text is left out without a word
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<pic>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (  # texts and lists, images where they stand
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLITTING = LISTS_ONLY.replace(PAD, "<image>")  # Idefics's and SmolVLM's
TAGGED = LISTS_ONLY.replace("{{ c['text'] }}", (
    "{% if m['role'] == 'assistant' %}{{ c['text'][:2] }}{% generation %}{{ c['text'][2:] }}{% endgeneration %}"
    "{% else %}{{ c['text'] }}{% endif %}"
))  # fmt: skip


def make_tokenizer(template):
    """The byte tokenizer with the special tokens of images, from id 247 on."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [PAD, IMAGE, VIDEO, BEGIN, END, *TILES]})
    assert len(tokenizer) == 260 and tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    tokenizer.chat_template = template
    return tokenizer


def llava_config(tokenizer):
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES).to_dict(),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=28, projection_dim=16).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(PAD),
        image_seq_length=4,
    )


def qwen_ids(tokenizer):
    names = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END)
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def qwen25_config(tokenizer):
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32, patch_size=14)
    return transformers.Qwen2_5_VLConfig(
        text_config=dict(SIZES, rope_parameters=rope),
        vision_config=dict(vision, window_size=56, fullatt_block_indexes=[1]),
        **qwen_ids(tokenizer),
    )


def qwen3_config(tokenizer):
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = dict(depth=4, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32, patch_size=14)
    return transformers.Qwen3VLConfig(
        text_config=dict(SIZES, rope_parameters=rope),
        vision_config=dict(vision, num_position_embeddings=16, deepstack_visual_indexes=[1, 2, 3]),
        **qwen_ids(tokenizer),
    )


def idefics3_config(tokenizer):
    return transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**SIZES).to_dict(),
        vision_config=dict(VISION, image_size=56),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )


def save_llava_processor(tokenizer, folder):
    pictures = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    transformers.LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token=PAD,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip


def save_qwen_processor(tokenizer, folder):
    """The part for images alone: the whole one cannot be made without torchvision, and can be read without."""
    pictures = transformers.Qwen2VLImageProcessorPil
    pictures(min_pixels=28 * 28, max_pixels=84 * 84, patch_size=14, merge_size=2).save_pretrained(folder)


def save_idefics3_processor(tokenizer, folder):
    """It cuts a picture into tiles, with a text of its own around each."""
    pictures = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=4).save_pretrained(folder)


FAMILIES = {
    "llava": (LISTS_ONLY, llava_config, save_llava_processor),
    "idefics3": (SPLITTING, idefics3_config, save_idefics3_processor),
    "qwen2_5_vl": (QWEN, qwen25_config, save_qwen_processor),
    "qwen3_vl": (QWEN, qwen3_config, save_qwen_processor),
}


@torch.no_grad()
def make_folder(family, folder):
    """Save a random target of a family with its tokenizer, chat template and processor files."""
    template, config_of, save_processor = FAMILIES[family]
    tokenizer = make_tokenizer(template)
    config = config_of(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.AutoModelForImageTextToText.from_config(config).float()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    save_processor(tokenizer, folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def draw(path, width, height, color):
    """Write a picture with a gradient."""
    from PIL import Image

    picture = Image.new("RGB", (width, height), color)
    for x in range(0, width, 3):
        for y in range(height):
            picture.putpixel((x, y), ((x * 7) % 256, (y * 11) % 256, color[2]))
    picture.save(path)
    return path.name


def make_step(target):
    """A training step of a new head with the target's whole vocabulary."""
    config = DraftConfig.from_target(target.config)
    module = random_module(config, DraftVocab.identity(VOCABULARY), seed=0)
    tables = TeacherTables.make(target.embedding.weight, target.head, module.target_ids)
    return TrainingStep(module, tables, load_recipe(None, []).eagle)
