"""The start card: that its numbers are the plan's, and that what it tells people to type works."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chairlift import boot, card
from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.keys import ApiKey


@pytest.fixture(scope="module")
def loaded(tiny_gguf: Callable[..., Path]) -> Loaded:
    config = Config(
        model=str(tiny_gguf()),
        backend="reference",
        served_model_name=("it's", "b"),
        api_key=(ApiKey.parse("open-sesame"),),
    )
    return boot.load(config)


def printed(loaded: Loaded, width: int, url: str | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(card.render(loaded, url))
    return out.getvalue()


def test_facts_are_plain_json_and_agree_with_the_plan(loaded: Loaded) -> None:
    """A card that says one thing while another was allocated."""
    facts = json.loads(json.dumps(card.facts(loaded)))
    assert facts["kv"]["pool_bytes"] == loaded.model.kv_bytes
    assert facts["model"]["weight_bytes"] == loaded.model.weight_bytes
    assert facts["model"]["aliases"] == ["b"]
    assert facts["limits"]["max_model_len"] == loaded.plan.max_model_len


def test_the_card_shows_every_fact_that_people_need(loaded: Loaded) -> None:
    """A line of the card lost in a change."""
    text = printed(loaded, 200)
    labels = ["model", "format", "start", "compute", "context", "KV pool", "slots", "ceiling"]
    assert [label for label in labels if f"{label} " not in text] == []
    assert f"{loaded.plan.pool_tokens:,} tokens reserved" in text
    assert "serving on" not in text


def test_what_the_plan_had_to_lower_is_on_the_card(loaded: Loaded) -> None:
    """More slots than memory carries at full context, and nobody is told."""
    note = "16 slots exceed the 2.0 full conversations"
    short = replace(loaded, plan=replace(loaded.plan, notes=(note,)))
    assert note in printed(short, 200)
    assert card.facts(short)["notes"] == [note]


def test_layers_that_differ_have_a_line(loaded: Loaded) -> None:
    """A model of two kinds of layers described as if it had one; or a line that says nothing for all others."""
    assert "layers" not in card.facts(loaded)["model"]
    assert "layers  " not in printed(loaded, 200)
    plain = loaded.spec.layers[0]
    local = replace(plain, num_kv_heads=1, window=1024)
    mixed = replace(loaded, spec=replace(loaded.spec, layers=(local, plain, local)))
    words = "3: 2 of attention with 1 KV head of 16 lanes, a window of 1,024 tokens; "
    assert card.facts(mixed)["model"]["layers"] == words + "1 of attention with 2 KV heads of 16 lanes"
    assert words in printed(mixed, 200)
    wide = replace(plain, value_dim=32)
    assert "2 KV heads of 16 and 32 lanes" in card.layers_in_words(replace(loaded.spec, layers=(plain, wide)))


@pytest.mark.parametrize("width", [80, 200])
def test_the_curl_command_survives_the_terminal(loaded: Loaded, width: int) -> None:
    """A command cut off or broken by the width of the terminal, or by a quote in a model's name."""
    text = printed(loaded, width, "http://127.0.0.1:8000")
    words = shlex.split(text[text.index("curl ") :].replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer $API_KEY" in words
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"][0]["content"] == "What is the capital of Germany?"


def test_the_curl_command_sends_a_key_where_one_is_needed(loaded: Loaded) -> None:
    """An example that is refused, for whoever keeps keys in a file."""
    for config, is_needed in ((Config(), False), (Config(api_key_file=Path("keys")), True)):
        assert ("Authorization" in printed(replace(loaded, config=config), 200, "http://x")) == is_needed


def test_no_key_is_shown(loaded: Loaded) -> None:
    """The API key printed where a screen is shared or a log is kept."""
    assert "open-sesame" not in printed(loaded, 80, "http://127.0.0.1:8000") + json.dumps(card.facts(loaded))
