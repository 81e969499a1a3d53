"""Chat templates against `transformers`' renderings, and against templates that mean harm."""

from __future__ import annotations

import json
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from chairlift.errors import ChairliftError, ModelError, RequestError
from chairlift.models.templates import budget
from chairlift.models.templates.chat_template import ChatTemplate
from support.paths import FIXTURES

FIXTURE = json.loads((FIXTURES / "template_expected.json").read_text(encoding="utf-8"))
CASES = [(template, chat) for template in FIXTURE["templates"] for chat in FIXTURE["chats"]]
HI = [{"role": "user", "content": "Hi"}]


def fixture_template(name: str) -> ChatTemplate:
    return ChatTemplate(FIXTURE["templates"][name], FIXTURE["specials"])


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source, {}).render(HI, **kwargs)


@pytest.mark.parametrize(("template", "chat"), CASES)
def test_rendering_equals_transformers(template: str, chat: str) -> None:
    """A space, a line end or a default that differs: the model sees a prompt that it was never trained on."""
    expected = FIXTURE["expected"][template][chat]
    compiled = fixture_template(template)
    if "text" in expected:
        assert compiled.render(**FIXTURE["chats"][chat]) == expected["text"]
    else:
        with pytest.raises(RequestError) as caught:
            compiled.render(**FIXTURE["chats"][chat])
        assert expected["error"] in str(caught.value)


def test_refusal_has_the_templates_own_words() -> None:
    """CASES D15: a template's `raise_exception` becomes a 500 with the template's source in it."""
    with pytest.raises(RequestError) as caught:
        fixture_template("gemma").render([{"role": "system", "content": "x"}])
    assert (str(caught.value), caught.value.http_status) == ("System role not supported", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[9]['content'] }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ none.x.y }}",
        "{% for x in 5 %}{% endfor %}",
        "{{ unknown_function() }}",
        "{{ messages|map('no_such_filter')|list }}",
        "{% include 'other' %}",
        "{{ messages|tojson(indent='x', bad=1) }}",
        "{{ unknown|tojson }}",
        "{{ raise_exception() }}",
        "{{ raise_exception(messages) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''|attr('__class__')|attr('mro') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__x=1) }}",
    ],
)
def test_failures_are_a_400_without_source(source: str) -> None:
    """A template that cannot handle a message, or reaches for Python, ends in a 500 or shows its source."""
    with pytest.raises(RequestError) as caught:
        render(source + "{# secret-of-the-source #}")
    text = str(caught.value)
    assert "secret" not in text
    assert "{" not in text.replace("{'role'", "")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}secret", "in line 1"),
        ("\n\n{{ secret ", "in line 3"),
        ("{% for x in y %}", "in line 1"),
        ("{{ 'secret'|no_such_filter }}", "no_such_filter"),
        ("{% for x in y recursive %}{% endfor %}", "in line 1: recursive loops are not supported$"),
        ("x" * 300_000, "300000 characters"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "recursion"),
        ("{% for i in x %}" * 25 + "{% endfor %}" * 25, "nested"),
    ],
)
def test_templates_that_do_not_compile(source: str, message: str) -> None:
    """The server starts, and every chat fails; or it does not start, and nobody sees why."""
    with pytest.raises(ModelError, match=message) as caught:
        ChatTemplate(source, {})
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 700


GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
BIG = "{% set b = 'a' * 8000000 %}"
LONG = "x" * 20_000

HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "quiet filters": "{% for i in range(99999) %}{% set x = range(99999)|select('odd')|list %}{% endfor %}",
    "sorting": "{% for i in range(9999) %}{% set x = range(99999)|sort %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of calls": "{% macro f(n) %}{{ f(n + 1) if n < 99 }}{{ f(n + 1) if n < 99 }}{% endmacro %}{{ f(0) }}",
    "comparing": BIG + "{% set c = b[1:] ~ 'a' %}{% for i in range(99999) %}{% if b == c %}{% endif %}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + LONG + "{% endfor %}",
    "text in a captured loop": "{% set y %}{% for i in range(99999) %}" + LONG + "{% endfor %}{% endset %}",
    "text in a macro": "{% macro m() %}"
    + LONG
    + "{% endmacro %}{% for i in range(99999) %}{% set x = m() %}{% endfor %}",
    "string * int": "{{ 'a' * 10**9 }}",
    "int * string": "{{ 10**9 * 'a' }}",
    "list * int": "{{ ([1] * 10**9)|length }}",
    "power": "{{ 10**(10**9) }}",
    "squaring": GROW.replace("START", "3").replace("STEP", "ns.x * ns.x") + "{{ ns.x % 7 }}",
    "~": GROW.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    "+": GROW.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "list +": GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "printing shared lists": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "shared lists as JSON": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
    "comparing shared lists": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x == [ns.x, 1] }}",
    "testing shared lists": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x is eq([ns.x]) }}",
    "hashing shared tuples": GROW.replace("START", "(1,)").replace("STEP", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "printing a namespace": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns }}",
    "a namespace in a list": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ [ns] }}",
    "slices": BIG + GROW.replace("START", "[]").replace("STEP", "ns.x + [b[1:]]").replace("60", "9999"),
    "|center": "{{ 'a'|center(10**9) }}",
    ".center": "{{ 'a'.center(10**9) }}",
    ".ljust": "{{ 'a'.ljust(10**9) }}",
    ".zfill": "{{ 'a'.zfill(10**9) }}",
    ".expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "|indent": "{{ 'a\n'|indent(10**9) }}",
    "|indent by text": "{{ ('a\n' * 100000)|indent('b' * 1000000) }}",
    "|format": "{{ '%1000000000d'|format(1) }}",
    "% with a star": "{{ '%*d' % (10**9, 1) }}",
    "% with many fields": "{{ ('%(a)s' * 100000) % {'a': 'b' * 1000000} }}",
    "precision": "{{ '%.1000000000f' % 1 }}",
    ".format": "{{ '{:1000000000}'.format(1) }}",
    ".format computed": "{{ '{:{}}'.format(1, 10**9) }}",
    ".format with many fields": "{{ ('{0}' * 100000).format('b' * 1000000) }}",
    "|tojson indent": "{{ [1]|tojson(indent=10**9) }}",
    "|tojson separators": BIG + "{{ range(10000)|list|tojson(separators=(b, b)) }}",
    "|replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    ".replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    ".replace nothing": "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "|join": "{{ range(999)|map('string')|join('b' * 1000000) }}",
    ".join": "{{ ('b' * 1000000).join(range(999)|map('string')) }}",
    "|join of defaults": BIG + "{{ range(9999)|map(attribute='x', default=b)|join }}",
    ".split": "{{ ('a ' * 8000000).split()|length }}",
    "|list": BIG + "{{ b|list|length }}",
    "|title": "{{ ('a ' * 4000000)|title|length }}",
    "|sum of lists": "{{ ([[1] * 1000] * 500)|sum(start=[])|length }}",
    "|round up": "{{ 1|round(-1000000000) }}",
    "|round": "{{ 1.5|round(1000000000, 'floor') }}",
    "escaping again and again": BIG + "{% set ns = namespace(x='&' * 3000000) %}{% for i in range(20) %}"
    "{% set ns.x = ns.x|forceescape|string %}{% endfor %}",
    ".strip": BIG + "{{ b.strip('b' * 8000000 + 'a')|length }}",
    "|trim": BIG + "{{ b|trim('b' * 8000000 + 'a')|length }}",
    ".rfind": "{{ ('a' * 16000000).rfind('b' + 'a' * 8000000) }}",
    "int.to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "strftime_now": "{{ strftime_now('%1000000000d') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model file's template holds a core for ever or takes the machine's memory."""
    monkeypatch.setattr(budget, "_SECONDS", 0.05)
    tracemalloc.start()
    before = time.thread_time()
    try:
        with pytest.raises(ChairliftError):
            render(HOSTILE[name])
        spent, peak = time.thread_time() - before, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < 2
    assert peak < 150e6


def test_honest_work_is_not_stopped() -> None:
    """The bounds are so tight that a long chat of a patient user fails."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(2000)]
    for name in ("chatml", "llama3", "qwen3", "mistral"):
        assert len(fixture_template(name).render(messages)) > 1_900_000


def test_renderings_do_not_spend_each_others_budget() -> None:
    """A budget kept on the template instead of the rendering runs out after some hours of service."""
    template = ChatTemplate("{{ ('a' * 9000000)|length }}{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda i: template.render([{"role": "user", "content": f" {i}"}]), range(40))
        assert list(texts) == [f"9000000 {i}" for i in range(40)]


def test_messages_are_not_changed() -> None:
    """A template that edits its input changes what the next choice or the log sees."""
    messages = [{"role": "user", "content": "Hi", "tool_calls": [{"a": 1}]}]
    before = json.dumps(messages)
    for source in (
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].pop('content') }}",
    ):
        with pytest.raises(RequestError):
            ChatTemplate(source, {}).render(messages)
    assert json.dumps(messages) == before


def test_variables() -> None:
    """`bos_token` undefined, or `tools` missing where a template asks whether it is none."""
    printed = ["bos_token", "tools is none", "documents is none", "add_generation_prompt", "extra", "pad_token"]
    source = "|".join("{{ " + expression + " }}" for expression in printed)
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(HI) == "<s>|True|True|True||"
    assert template.render(HI, add_generation_prompt=False, tools=[], extra=1) == "<s>|False|True|False|1|"


def test_strftime_now() -> None:
    """Llama 3 templates write today's date; the clock must be one that a test can set."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 2, 3))
    assert template.render(HI) == "03 Feb 2026"
