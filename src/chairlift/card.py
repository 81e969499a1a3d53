"""The start card shows what was loaded and what was reserved: as text for people, and as a dict for programs.

`facts` is the one source: the card, `/v1/models` and `chairlift info --json` all show it. Has no numbers of its own.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

from chairlift import cost

if TYPE_CHECKING:
    from rich.console import Group

    from chairlift.boot import Loaded
    from chairlift.models.spec import LayerSpec, ModelSpec


def facts(loaded: Loaded) -> dict[str, Any]:
    """All that the card says, as plain JSON values: sizes in bytes, times in seconds, rates per second."""
    plan = loaded.plan
    return {
        "model": {
            "name": plan.model_name,
            "aliases": list(loaded.names[1:]),
            "title": loaded.spec.name,
            "architecture": loaded.spec.architecture,
            "format": plan.model_format,
            "num_parameters": loaded.num_parameters,
            "file_weight_bytes": plan.weight_bytes,
            "weight_bytes": loaded.model.weight_bytes,
            "context_length": loaded.spec.context_length,
            "chat_template": loaded.template is not None,
            **({"layers": layers} if (layers := layers_in_words(loaded.spec)) else {}),
        },
        "startup_s": {part: round(seconds, 4) for part, seconds in loaded.timings.items()},
        "machine": {
            **loaded.backend.device,
            "memory_available_bytes": loaded.memory.available_bytes,
            "memory_limited_by": loaded.memory.limited_by,
            "bandwidth_bytes_per_s": round(loaded.bandwidth),
            **loaded.backend.rounding,
        },
        "kv": {
            "dtype": plan.kv_dtype,
            "bytes_per_token": plan.kv_bytes_per_token,
            "pool_tokens": plan.pool_tokens,
            "pool_bytes": plan.pool_bytes,
            "full_conversations": round(plan.full_conversations, 2),
            "prefix_caching": plan.prefix_caching,
        },
        "limits": {
            "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "max_queue": plan.max_queue,
            "batching": plan.batching,
        },
        "one_stream_ceiling_tokens_per_s": round(cost.one_stream_ceiling(loaded.bandwidth, loaded.read_bytes), 1),
        "notes": list(plan.notes),
    }


def lines(loaded: Loaded) -> list[tuple[str, str]]:
    """The card as (label, text) lines."""
    said = facts(loaded)
    model, machine, kv, limits = said["model"], said["machine"], said["kv"], said["limits"]
    human = cost.human_bytes
    spent = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in said["startup_s"].items())
    also = f" (also {', '.join(model['aliases'])})" if model["aliases"] else ""
    bandwidth = machine["bandwidth_bytes_per_s"] / 1e9
    return [
        ("model", f"{model['name']}{also}: {model['title']}, {model['num_parameters'] / 1e6:,.0f} M parameters"),
        ("format", f"{model['format']}, weights {human(model['weight_bytes'])} in memory"),
        *([("layers", model["layers"])] if "layers" in model else []),
        ("start", f"{sum(said['startup_s'].values()):.2f} s: {spent}"),
        ("compute", loaded.backend.summary),
        (
            "context",
            f"{limits['max_model_len']:,} tokens a request, each {human(kv['bytes_per_token'])} of KV ({kv['dtype']})",
        ),
        (
            "KV pool",
            f"{kv['pool_tokens']:,} tokens reserved ({human(kv['pool_bytes'])}), {kv['full_conversations']:.1f} "
            f"conversations of full length",
        ),
        ("slots", f"{limits['max_num_seqs']} run at once ({limits['batching']}), {limits['max_queue']} may wait"),
        (
            "ceiling",
            f"{said['one_stream_ceiling_tokens_per_s']:.0f} tokens/s for one stream: a token reads "
            f"{human(loaded.read_bytes)}, memory gives {bandwidth:.0f} GB/s",
        ),
        *(("note", note) for note in said["notes"]),
    ]


def layers_in_words(spec: ModelSpec) -> str:
    """How many layers there are of each kind, the most frequent first; "" where all are alike."""
    kinds = Counter(_layer_in_words(layer) for layer in spec.layers)
    if len(kinds) == 1:
        return ""
    return f"{spec.num_layers}: " + "; ".join(f"{count} of {words}" for words, count in kinds.most_common())


def _layer_in_words(layer: LayerSpec) -> str:
    lanes = f"{layer.head_dim}" if layer.head_dim == layer.value_dim else f"{layer.head_dim} and {layer.value_dim}"
    heads = f"{layer.num_kv_heads} KV head{'' if layer.num_kv_heads == 1 else 's'} of {lanes} lanes"
    window = "" if layer.window is None else f", a window of {layer.window:,} tokens"
    return f"{layer.kind} with {heads}{window}"


def render(loaded: Loaded, url: str | None = None) -> Group:
    """The card for a terminal; print it with a rich Console. With a server's `url` it shows a command to try."""
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in lines(loaded):
        table.add_row(label, Text(text))
    parts: list[RenderableType] = [table]
    if url is not None:
        parts += [Text(f"\nserving on {url}\n"), Text(example(loaded, url))]
    return Group(*parts)


def example(loaded: Loaded, url: str) -> str:
    """A curl command that gets an answer, in lines that a narrow terminal does not break."""
    body: dict[str, Any] = {"model": loaded.plan.model_name, "temperature": 0}
    if loaded.template is None:
        endpoint = "completions"
        body["prompt"] = "The capital of France is"
    else:
        endpoint = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of Germany?"}]
    parts = [f"curl {url}/v1/{endpoint}"]
    if loaded.config.api_key or loaded.config.api_key_file:
        parts.append('-H "Authorization: Bearer $API_KEY"')
    parts.append("-H 'Content-Type: application/json'")
    text = json.dumps(body, ensure_ascii=False).replace(', "messages"', ',\n  "messages"')
    parts.append(f"-d {shlex.quote(text)}")
    return " \\\n  ".join(parts)
