"""Toy tokenizers and chat templates for the data tests."""

import copy
import json

from modelopt_eagle.data import Conversation, Message
from modelopt_eagle.target.tiny import CHATML_TEMPLATE, make_byte_tokenizer

INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Bot: ' if m.role == 'assistant' else 'Rules: ' }}"
    "{{ m.content + ('<|im_end|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML_TEMPLATE, "inst": INST, "plain": PLAIN}

EMPTY_THINK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + ('<think></think>' if m.role == 'assistant' else '') "
    "+ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
)
PROMPT_ONLY_THINK = CHATML_TEMPLATE.replace(
    "'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think></think>' }}"
)
HISTORY_ONLY_THINK = EMPTY_THINK.replace("assistant\n<think></think>' }}", "assistant\n' }}")
REASONING_PROMPT = (  # the prompt opens the reasoning, finished turns lose it
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' "
    "+ (m.content.split('</think>')[-1] if m.role == 'assistant' else m.content) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
FORGETS_THINK = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNSTABLE = (
    "{% if add_generation_prompt %}{{ 'prompt:' }}{% else %}{{ 'final:' }}{% endif %}"
    "{% for m in messages %}{{ m.content|upper }}{% endfor %}"
)


def tokenizer_with(template: str):
    """The byte tokenizer with another chat template."""
    tokenizer = copy.deepcopy(make_byte_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def make_word_tokenizer(template: str, trim_offsets: bool = False):
    """A byte-level tokenizer with merges across white space, whose offsets may leave out white space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = make_byte_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = dict(backend["vocab"])
    merges = [("Ċ", "Ċ"), ("Ġ", "h"), ("Ġh", "i"), (".", "Ċ")]  # "\n\n", " h", " hi", ".\n"
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def talk(*texts: str, system: str | None = None, finish: str | None = None, first: str = "user") -> Conversation:
    """A conversation whose turns alternate, beginning with ``first``."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    messages = [Message("system", system)] if system else []
    messages += [Message(roles[i % 2], text) for i, text in enumerate(texts)]
    if finish:
        messages[-1] = Message(messages[-1].role, messages[-1].content, finish)
    return Conversation("c", tuple(messages), place="here:1")


def learned(tokenizer, row) -> list[str]:
    """The supervised runs of a row, as text."""
    runs, previous = [], False
    for token, flag in zip(row.input_ids, row.supervised, strict=True):
        if flag and not previous:
            runs.append([])
        if flag:
            runs[-1].append(token)
        previous = flag
    return [tokenizer.decode(run) for run in runs]


def write_lines(path, *rows):
    """Write rows (objects, or text as it is) as lines."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path
