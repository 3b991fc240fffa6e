"""Rendering by the target's own chat template: messages in the form that templates take, tools, arguments, the date.

No template family is known here. What a template does with content lists, reasoning and tool calls is found by
rendering a probe once a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.roles import Message
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.chat import chat_settings, dated_template

__all__ = ["mending_argument", "render_text", "renders_tools", "template_messages"]

_TEXT_PROBE = "modelopt eagle probe"
_TAKES_LISTS: dict[str, bool] = {}  # chat template -> whether it renders content lists and drops plain texts
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # what templates read, in this order


def render_text(
    tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[dict] = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """The template's text for some turns.

    Args:
        tokenizer: with its chat template, and what :func:`modelopt_eagle.target.chat.set_chat_settings` gave it.
        messages: at least one.
        add_generation_prompt: end with what a server puts before the answer.
        tools: descriptions of tools.
        arguments: variables of the template for this conversation; they win over the tokenizer's own.

    Raises:
        RowRejected: ``template_refused``, with the template's own words.
        DataError: the tokenizer has no chat template.
    """
    template, given = _template(tokenizer), {**chat_settings(tokenizer).arguments, **(arguments or {})}
    made = template_messages(tokenizer, messages)
    try:
        return _render(tokenizer, template, made, add_generation_prompt, tools, given)
    except Exception as error:  # a template may raise anything
        mend = mending_argument(
            tokenizer, lambda more: _render(tokenizer, template, made, add_generation_prompt, tools, {**given, **more})
        )
        raise RowRejected("template_refused", f"the chat template refused the conversation: {error}{mend}") from error


def _template(tokenizer) -> str:
    """The template's source, a pinned date in the place of today's.

    Raises:
        DataError: the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the target's tokenizer has no chat template, so what the target is served cannot be rendered; "
            "use an instruction-tuned target, or give a template (--chat_template, model.chat_template)"
        )
    return dated_template(tokenizer.get_chat_template(), chat_settings(tokenizer).date)


def _render(tokenizer, template: str, messages: list[dict], add_generation_prompt: bool, tools, arguments) -> str:
    return tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **arguments,
    )


def mending_argument(tokenizer, render, good=lambda text: True) -> str:
    """A sentence that names the template's argument for reasoning with which a rendering succeeds; ``""`` without one.

    Args:
        render: renders with further arguments; may raise anything.
        good: whether the text is what was wanted.
    """
    for name in template_variables(tokenizer.get_chat_template()):
        if not re.search("think|reason", name, re.IGNORECASE):
            continue
        for value in (False, True):
            try:
                mended = good(render({name: value}))
            except Exception:
                continue
            if mended:
                return f"; data.template_arguments: {{{name}: {str(value).lower()}}} mends it"
    return ""


@lru_cache(maxsize=64)
def template_variables(template: str) -> tuple[str, ...]:
    """Names that a template reads and does not set itself, ascending; none if it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    plain = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", template)
    try:
        found = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    except TemplateSyntaxError:
        return ()
    return tuple(sorted(found))


def template_messages(tokenizer, messages: Sequence[Message]) -> list[dict]:
    """Messages as the chat template takes them.

    A turn with images is a list of parts. So is every turn under a template that renders lists only, as those of
    LLaVA and SmolVLM do: they leave a plain text out without a word. Which kind a template is, one rendering tells.
    Reasoning is given under the names that the template reads.
    """
    lists, template = _takes_lists_only(tokenizer), tokenizer.get_chat_template()
    return [_template_message(message, lists, template) for message in messages]


def _template_message(message: Message, lists: bool, template: str) -> dict:
    made: dict[str, Any] = {"role": message.role, "content": _content(message, lists)}
    if message.reasoning is not None:
        made |= dict.fromkeys(_reasoning_names(template), message.reasoning)
    if message.tool_calls:
        made["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


@lru_cache(maxsize=64)
def _reasoning_names(template: str) -> tuple[str, ...]:
    found = tuple(name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", template))
    return found or _REASONING_NAMES[:1]


def _content(message: Message, lists: bool):
    if not message.parts and not lists:
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in message.parts or (message.content,)
    ]


def _takes_lists_only(tokenizer) -> bool:
    """Whether the template drops texts that do not stand in a list of parts."""
    template = tokenizer.get_chat_template()
    if template not in _TAKES_LISTS:
        _TAKES_LISTS[template] = "type" in template and not _renders(tokenizer, _TEXT_PROBE) and _renders(
            tokenizer, [{"type": "text", "text": _TEXT_PROBE}]
        )  # fmt: skip
    return _TAKES_LISTS[template]


def _renders(tokenizer, content) -> bool:
    """Whether the probe comes out of a user's turn with this content."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # a template may raise anything
        return False
    return _TEXT_PROBE in text


def renders_tools(tokenizer, tools: Sequence[dict], prompt: str, render) -> bool:
    """Whether the descriptions of tools are in a rendered prompt: all their names, or a text that changes with them.

    Args:
        prompt: the rendering with the tools.
        render: renders the same turns without them; it may raise.
    """
    if not all(tool["function"]["name"] in prompt for tool in tools):
        return False
    try:
        return render() != prompt
    except RowRejected:
        return True  # the template takes these turns with tools only
