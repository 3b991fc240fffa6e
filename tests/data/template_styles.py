# ruff: noqa: E501
"""Chat templates in the styles that models of the field use, in our own words, and what a target writes under each.

``Style.writes(reasoning, content)`` is the text that a target writes behind the generation prompt, its end token
included: the part of the oracle that knows each style.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from modelopt_eagle.target.tiny import make_byte_tokenizer


@dataclass(frozen=True)
class Style:
    """One style.

    Attributes:
        template: Jinja source.
        end: what the target ends a turn with.
        specials: special tokens that the template uses.
        lead: white space that the target writes before its content.
        writes_reasoning: the text of reasoning and content together, where the template has a place for reasoning.
        frame: what the target writes before its content without reasoning.
        trims: whether the template takes white space off the ends of contents.
        thinks: whether the generation prompt begins reasoning, so that an answer must have some.
        system: whether system turns are taken.
        rewrites: whether finished turns look otherwise than when they were written.
    """

    template: str
    end: str
    specials: tuple[str, ...] = ()
    lead: str = ""
    frame: str = ""
    writes_reasoning: Callable[[str, str], str] | None = None
    trims: bool = False
    thinks: bool = False
    system: bool = True
    rewrites: bool = False
    arguments: dict = field(default_factory=dict)

    def writes(self, content: str, reasoning: str | None = None) -> str:
        """What the target writes behind the generation prompt."""
        body = content.strip() if self.trims else content
        if reasoning is not None:
            return self.writes_reasoning(reasoning, body) + self.end
        return self.lead + self.frame + body + self.end

    def tokenizer(self):
        """The byte tokenizer with this style's template and special tokens."""
        made = copy.deepcopy(make_byte_tokenizer())
        made.add_special_tokens({"additional_special_tokens": list(self.specials)})
        made.chat_template = self.template
        return made

    def end_ids(self, tokenizer) -> list[int]:
        """What the generation config of such a target would list."""
        found = tokenizer.convert_tokens_to_ids(self.end)
        return [found] if isinstance(found, int) and found != tokenizer.unk_token_id else []


def each(user: str, assistant: str, system: str, prompt: str, begin: str = "") -> str:
    """A template that writes each turn by its role's pattern, ``@`` standing for the content."""
    parts = {"user": user, "assistant": assistant, "system": system}
    body = "".join(
        f"{{%- {'if' if n == 0 else 'elif'} turn.role == '{role}' -%}}"
        + pattern.replace("@", "{{ turn.content }}")
        .replace("§", "{{ turn.content | trim }}")
        .replace("~", "{{ '\\n' }}")
        for n, (role, pattern) in enumerate(parts.items())
    )
    prompt, begin = (text.replace("~", "{{ '\\n' }}") for text in (prompt, begin))
    return (
        f"{begin}{{%- for turn in messages -%}}{body}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"
    )


def _think(reasoning: str, content: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{content}"


_HYBRID = (  # reasoning kept for the turn being answered, an empty pair for answers without; the prompt may close it
    "{%- set seen = namespace(asked=-1) -%}"
    "{%- for turn in messages -%}{%- if turn.role == 'user' -%}{%- set seen.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for turn in messages -%}{%- if turn.role != 'assistant' -%}"
    "{{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' -}}"
    "{%- else -%}{%- set said = turn.content -%}{%- set why = '' -%}"
    "{%- if turn.reasoning_content is string -%}{%- set why = turn.reasoning_content -%}"
    "{%- elif '</think>' in said -%}{%- set why = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if loop.index0 > seen.asked and (loop.last or why) -%}{{- '<think>\\n' + why + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- said + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)
_ALWAYS_THINKS = _HYBRID.replace(
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}",
    "{{- '<think>\\n' -}}",
)
_FORGETS = (  # the prompt opens the reasoning, no finished turn keeps it
    "{{- bos_token -}}{%- for turn in messages -%}{%- if turn.role == 'assistant' -%}"
    "{{- '<|Assistant|>' + turn.content.split('</think>')[-1] + '<|end_of_text|>' -}}"
    "{%- elif turn.role == 'user' -%}{{- '<|User|>' + turn.content -}}{%- else -%}{{- turn.content -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}"
)
_CHANNELS = (  # each message names its channel; the last answer ends with another token than the ones before it
    "{%- for turn in messages -%}{%- if turn.role == 'assistant' -%}"
    "{%- if turn.thinking and loop.last and not add_generation_prompt -%}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + turn.thinking + '<|end|>' -}}{%- endif -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + turn.content + ('<|return|>' if loop.last else '<|end|>') -}}"
    "{%- else -%}{{- '<|start|>' + turn.role + '<|message|>' + turn.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
_FIRST_USER = (  # the system text goes into the first user turn; roles have other names
    "{%- set head = '' -%}{%- if messages[0].role == 'system' -%}{%- set head = messages[0].content + '\\n\\n' -%}"
    "{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for turn in messages -%}{{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else 'user') + '\\n' -}}"
    "{%- if loop.first -%}{{- head -}}{%- endif -%}{{- turn.content | trim + '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
_BRACKETS = (
    "{{- bos_token -}}{%- set rules = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set rules = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for turn in messages -%}{%- if turn.role == 'user' -%}"
    "{{- '[INST] ' + (rules if loop.first else '') + turn.content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + turn.content + '<|end_of_text|>' -}}{%- endif -%}{%- endfor -%}"
)
_BRACKET_THINK = (
    "{%- for turn in messages -%}{%- if turn.role == 'system' -%}{{- '[SYSTEM]' + turn.content + '[/SYSTEM]' -}}"
    "{%- elif turn.role == 'user' -%}{{- '[INST]' + turn.content + '[/INST]' -}}{%- else -%}"
    "{%- if turn.reasoning_content -%}{{- '[THINK]' + turn.reasoning_content + '[/THINK]' -}}{%- endif -%}"
    "{{- turn.content + '<|end_of_text|>' -}}{%- endif -%}{%- endfor -%}"
)

STYLES = {
    "chatml": Style(each("<|im_start|>user~@<|im_end|>~", "<|im_start|>assistant~@<|im_end|>~",
                         "<|im_start|>system~@<|im_end|>~", "<|im_start|>assistant~"), "<|im_end|>"),
    "chatml with a rule of its own": Style(
        "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}{%- endif -%}"
        + each("<|im_start|>user~@<|im_end|>~", "<|im_start|>assistant~@<|im_end|>~",
               "<|im_start|>system~@<|im_end|>~", "<|im_start|>assistant~"), "<|im_end|>"),
    "headers": Style(
        each(*(f"<|head|>{role}<|body|>~~§<|eot|>" for role in ("user", "assistant", "system")),
             "<|head|>assistant<|body|>~~", "{{- bos_token -}}"),
        "<|eot|>", ("<|head|>", "<|body|>", "<|eot|>"), trims=True),
    "brackets": Style(_BRACKETS, "<|end_of_text|>", ("<|end_of_text|>",), lead=" "),
    "tight brackets": Style(each("[INST]@[/INST]", "@<|end_of_text|>", "[SYSTEM]@[/SYSTEM]", ""), "<|end_of_text|>",
                            ("<|end_of_text|>", "[INST]", "[/INST]")),
    "brackets that think": Style(_BRACKET_THINK, "<|end_of_text|>", ("<|end_of_text|>", "[INST]", "[/INST]"),
                                 writes_reasoning=lambda why, said: f"[THINK]{why}[/THINK]{said}"),
    "first user": Style(_FIRST_USER, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>"), trims=True),
    "role marks and an end": Style(each("<|user|>~@<|end|>~", "<|assistant|>~@<|end|>~", "<|system|>~@<|end|>~",
                                        "<|assistant|>~"), "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "role marks in plain text": Style(each("<|user|>~@</s>~", "<|assistant|>~@</s>~", "<|system|>~@</s>~",
                                           "<|assistant|>~"), "</s>", ("</s>",)),
    "names": Style(each("USER: @{{ ' ' }}", "ASSISTANT: @</s>", "@{{ ' ' }}", "ASSISTANT:"), "</s>", ("</s>",), lead=" "),
    "headings": Style(each("### Instruction:~@~~", "### Response:~@</s>~~", "@~~", "### Response:~"), "</s>", ("</s>",)),
    "next role ends": Style(each("<|user|>~@", "<|assistant|>~@", "<|system|>~@", "<|assistant|>", "[begin]"), "<|user|>",
                            ("<|user|>", "<|assistant|>", "<|system|>"), lead="\n"),
    "wide bars": Style(each("<｜User｜>@", "<｜Assistant｜>@<｜end｜>", "@", "<｜Assistant｜>", "{{- bos_token -}}"), "<｜end｜>",
                       ("<｜User｜>", "<｜Assistant｜>", "<｜end｜>")),
    "forgets reasoning": Style(_FORGETS, "<|end_of_text|>", ("<|end_of_text|>", "<|User|>", "<|Assistant|>"), thinks=True,
                               rewrites=True),
    "hybrid, without reasoning": Style(_HYBRID, "<|im_end|>", rewrites=True, writes_reasoning=_think,
                                       arguments={"enable_thinking": False}),
    "hybrid, with reasoning": Style(_HYBRID, "<|im_end|>", rewrites=True, writes_reasoning=_think, thinks=True),
    "always thinks": Style(_ALWAYS_THINKS, "<|im_end|>", rewrites=True, thinks=True,
                           writes_reasoning=lambda why, said: f"{why}\n</think>\n\n{said}"),
    "channels": Style(_CHANNELS, "<|return|>", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
                      frame="<|channel|>final<|message|>", rewrites=True,
                      writes_reasoning=lambda why, said: f"<|channel|>analysis<|message|>{why}<|end|><|start|>assistant"
                                                         f"<|channel|>final<|message|>{said}"),
    "roles between marks": Style(
        each(*(f"<|role|>{role}<|/role|>@<|end_of_text|>~" for role in ("user", "assistant", "system")),
             "<|role|>assistant<|/role|>"), "<|end_of_text|>", ("<|role|>", "<|/role|>", "<|end_of_text|>")),
    "turn marks": Style(
        each("<|TURN|><|USER|>§<|END|>", "<|TURN|><|BOT|>§<|END|>", "<|TURN|><|SYSTEM|>§<|END|>", "<|TURN|><|BOT|>",
             "{{- bos_token -}}"), "<|END|>", ("<|TURN|>", "<|USER|>", "<|BOT|>", "<|SYSTEM|>", "<|END|>"), trims=True),
    "a middle mark": Style(
        each("<|im_user|>user<|mid|>@<|im_end|>", "<|im_bot|>assistant<|mid|>@<|im_end|>", "<|im_sys|>system<|mid|>@<|im_end|>",
             "<|im_bot|>assistant<|mid|>"), "<|im_end|>", ("<|im_user|>", "<|im_bot|>", "<|im_sys|>", "<|mid|>")),
    "two line breaks": Style(each("User: @~~", "Bird: @<|endoftext|>~", "@~~", "Bird:"), "<|endoftext|>", lead=" "),
    "the end of the text": Style(each("<|user|>~@~", "<|assistant|>~@<|endoftext|>~", "<|system|>~@~", "<|assistant|>~"),
                                 "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|system|>")),
    "square bars": Style(each("[|user|]@~", "[|assistant|]@[|endofturn|]~", "[|system|]@[|endofturn|]~", "[|assistant|]"),
                         "[|endofturn|]", ("[|user|]", "[|assistant|]", "[|system|]", "[|endofturn|]")),
    "names of two words": Style(each("Good User: @<|turn|>", "Good Helper: @<|turn|>", "@<|turn|>", "Good Helper:"), "<|turn|>",
                                ("<|turn|>",), lead=" "),
    "sentences": Style(
        each(*(f"<begin>{role} name={role}~@<stop>~" for role in ("user", "assistant", "system")),
             "<begin>assistant name=assistant~"), "<stop>", ("<begin>", "<stop>")),
    "a closed pair in every prompt": Style(
        each("<|im_start|>user~@<|im_end|>~", "<|im_start|>assistant~<think></think>@<|im_end|>~",
             "<|im_start|>system~@<|im_end|>~", "<|im_start|>assistant~<think></think>"), "<|im_end|>"),
    "ends spelled out": Style(each("Q: @~", "A: @</s>~", "@~", "A:{{ ' ' }}"), "</s>"),
}  # fmt: skip
