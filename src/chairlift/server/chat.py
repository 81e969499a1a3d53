"""From messages to prompt text: checks the messages, and brings them into the form that chat templates expect.

Templates expect strings, so text parts are joined and a null becomes "". The newer role name "developer" becomes
"system" where a template does not know it. What a template would silently drop is refused instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chairlift.errors import RequestError
from chairlift.models.templates.chat_template import ChatTemplate
from chairlift.server.http_errors import UnsupportedParameter
from chairlift.server.schema import ROLES, ChatRequest
from chairlift.text import one_line

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"})

_MARK = "\ue000{}\ue001"  # private-use characters, which no message is likely to hold


_KNOWN = frozenset({"role", "content", "tool_calls", "function_call", "audio", "refusal"})


def ignored(request: ChatRequest, template: ChatTemplate) -> list[str]:
    """The names that the prompt cannot depend on: message fields and variables that the template's text does not name.

    Further fields of text parts are among them, since the template gets all parts as one string.
    """
    fields = _named(request.messages) - _KNOWN
    variables = request.chat_template_kwargs or {}
    named = [(f"messages[].{name}", name) for name in sorted(fields)]
    named += [(f"chat_template_kwargs.{name}", name) for name in sorted(variables)]
    unread = [where for where, name in named if name not in template.source]
    contents = [message["content"] for message in request.messages if isinstance(message.get("content"), list)]
    parts = _named(part for content in contents for part in content) - {"type", "text"}
    return unread + [f"messages[].content[].{name}" for name in sorted(parts)]


def _named(objects: Iterable[dict[str, Any]]) -> set[str]:
    """The names that have a value other than null in any of the objects."""
    return {name for value in objects for name, inner in value.items() if inner is not None}


def render(request: ChatRequest, template: ChatTemplate | None) -> str:
    """The prompt text of a chat request. A RequestError names the message and what is wrong with it."""
    if template is None:
        raise RequestError("this model has no chat template", param="messages", hint="use /v1/completions")
    extra = request.chat_template_kwargs or {}
    for name in extra:
        if name in _RESERVED or not name.isidentifier():
            raise RequestError(f"`chat_template_kwargs` may not set `{one_line(name)}`", param="chat_template_kwargs")
    options = {**extra, "add_generation_prompt": request.add_generation_prompt is not False}
    messages = [_plain(message, f"messages[{i}]", template.source) for i, message in enumerate(request.messages)]
    try:
        text = template.render(messages, **options)
    except RequestError as error:
        error.param = error.param or "messages"
        raise
    _refuse_dropped(messages, template, options)
    return text


def _refuse_dropped(messages: list[dict[str, Any]], template: ChatTemplate, options: dict[str, Any]) -> None:
    """Raises RequestError for a message that the template silently drops, as some do with roles they do not know.

    Many templates write any role and name none, so a second rendering finds out, with a mark as the message's content.
    """
    doubtful = [
        i
        for i, message in enumerate(messages)
        if message["role"] not in ("user", "assistant")
        and not any(f"{quote}{message['role']}{quote}" in template.source for quote in "'\"")
    ]
    if not doubtful:
        return
    marked = list(messages)
    for i in doubtful:
        marked[i] = {**messages[i], "content": _MARK.format(i)}
    try:
        text = template.render(marked, **options)
    except RequestError:
        return  # a template that interprets contents refuses the mark
    for i in doubtful:
        if _MARK.format(i) not in text:
            role, where = messages[i]["role"], f"messages[{i}].role"
            raise RequestError(f"`{where}` is {role}, which this model's chat template passes over", param=where)


def _plain(message: dict[str, Any], where: str, source: str) -> dict[str, Any]:
    """One message in the form that templates expect."""
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"`{where}.role` must be one of {', '.join(ROLES)}", param=f"{where}.role")
    plain = {**message, "content": _text(message, where)}
    if role == "developer" and "developer" not in source:
        plain["role"] = "system"
    for field in ("tool_calls", "function_call"):
        if not plain.get(field):
            plain.pop(field, None)
        elif field not in source:
            raise UnsupportedParameter(f"{where}.{field}", "null: this model's chat template does not know it")
    for field in ("audio", "refusal"):
        if plain.pop(field, None) is not None:
            raise UnsupportedParameter(f"{where}.{field}", "null")
    return plain


def _text(message: dict[str, Any], where: str) -> str:
    """The content as one string. Parts are joined by line ends."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if (
        content is None
        and message["role"] == "assistant"
        and (message.get("tool_calls") or message.get("function_call"))
    ):
        return ""
    param = f"{where}.content"
    if not isinstance(content, list) or not content:
        raise RequestError(f"`{param}` must be a string or a list of text parts", param=param)
    return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"`{where}` must be an object with a `type`", param=where)
    if part["type"] != "text":
        kind = one_line(part["type"])
        raise RequestError(f"`{where}` is of type {kind!r}; this server supports text parts only", param=where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"`{where}.text` must be a string", param=f"{where}.text")
    return str(part["text"])
