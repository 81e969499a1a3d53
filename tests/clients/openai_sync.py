"""OpenAI's own package, as most programs use it."""

from typing import Any

import openai
from common import TEXT, URL, raised

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30)
chats = client.chat.completions


def say(words: str, **fields: Any) -> Any:
    return {"model": "fake", "messages": [{"role": "user", "content": words}], **fields}


# -- in one piece
whole = chats.create(**say("Hi", logprobs=True, top_logprobs=1), extra_body={"top_k": 5})
assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (TEXT, "stop")
assert whole.usage is not None
assert whole._request_id
assert whole.choices[0].logprobs is not None
entries = whole.choices[0].logprobs.content or []
assert b"".join(bytes(entry.bytes or []) for entry in entries[:-1]).decode() == TEXT
cut = chats.create(**say("endless", max_tokens=5))
assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("hahah", "length")

# -- in pieces
*chunks, last = list(chats.create(**say("Hi", stream=True, stream_options={"include_usage": True})))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
assert last.usage is not None
assert last.usage.completion_tokens == whole.usage.completion_tokens
assert len({chunk.id for chunk in [*chunks, last]}) == 1
stamped = chats.create(**say("Hi", stream=True), extra_headers={"X-Chairlift-Timestamps": "1"})
assert all((chunk.model_extra or {})["timestamps"]["sent_s"] > 0 for chunk in stamped)

# -- with the package's helper, which refuses chunks that do not add up
with chats.stream(**say("Hi", n=2)) as helper:
    kinds = [event.type for event in helper]
    final = helper.get_final_completion()
assert [choice.message.content for choice in final.choices] == [TEXT, TEXT]
assert kinds.count("content.done") == 2

# -- texts and models
text = client.completions.create(model="fake", prompt="Hi", max_tokens=100, echo=True, logprobs=0)
assert text.choices[0].text == "Hi" + TEXT
pieces = client.completions.create(model="fake", prompt="Hi", max_tokens=100, stream=True)
assert "".join(piece.choices[0].text for piece in pieces) == TEXT
assert [model.id for model in client.models.list()] == ["fake", "alias"]
assert client.models.retrieve("alias").id == "alias"

# -- errors
got: list[Any] = []
broken = raised(openai.APIError, lambda: got.extend(iter(chats.create(**say("break", stream=True)))))
assert "could not be computed" in broken.message
assert raised(openai.InternalServerError, lambda: chats.create(**say("break"))).code == "engine_error"


def refusals(stream: bool) -> None:
    """The same, streamed or not: no stream begins only to fail."""
    wrong_name = say("Hi", stream=stream) | {"model": "gpt-4"}
    assert raised(openai.NotFoundError, lambda: chats.create(**wrong_name)).code == "model_not_found"
    too_long = raised(openai.BadRequestError, lambda: chats.create(**say("x" * 600, stream=stream)))
    assert (too_long.code, too_long.param) == ("context_length_exceeded", "messages")
    as_json = say("Hi", stream=stream, response_format={"type": "json_object"})
    assert raised(openai.BadRequestError, lambda: chats.create(**as_json)).code == "unsupported_parameter"


refusals(False)
refusals(True)
