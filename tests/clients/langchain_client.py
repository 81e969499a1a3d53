"""langchain-openai, as agents and chains use it."""

import asyncio
from typing import Any

import openai
from common import TEXT, URL, raised
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI

ADDRESS: Any = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
TURNS: Any = [("system", "Be brief."), ("human", "Hi")]
chat = ChatOpenAI(model="fake", **ADDRESS)

# -- in one piece
whole = chat.invoke(TURNS)
assert (whole.content, whole.response_metadata["finish_reason"]) == (TEXT, "stop")
assert whole.response_metadata["model_name"] == "fake"
probed = ChatOpenAI(model="fake", logprobs=True, top_logprobs=1, **ADDRESS).invoke(TURNS)
assert len(probed.response_metadata["logprobs"]["content"]) == len(TEXT.encode()) + 1
assert OpenAI(model="fake", **ADDRESS).invoke("Hi") == TEXT
again = chat.invoke([("human", [{"type": "text", "text": "Hi"}]), whole, ("human", "Once more")])
assert again.content == TEXT

# -- in pieces
for usage in (False, True):
    chunks = list(ChatOpenAI(model="fake", stream_usage=usage, **ADDRESS).stream(TURNS))
    joined = sum(chunks[1:], chunks[0])
    assert (joined.content, joined.response_metadata["finish_reason"]) == (TEXT, "stop")
    if usage:
        assert joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


async def several() -> list[str]:
    batch = await chat.abatch(["Hi", "Hello"])
    text = "".join([str(chunk.content) async for chunk in chat.astream("Hi")])
    return [*(str(answer.content) for answer in batch), text]


assert asyncio.run(several()) == [TEXT] * 3

# -- errors
got: list[Any] = []
broken = raised(openai.APIError, lambda: got.extend(iter(chat.stream("break"))))
assert "could not be computed" in broken.message
raised(ContextOverflowError, lambda: chat.invoke("x" * 600))
raised(openai.BadRequestError, lambda: ChatOpenAI(model="fake", top_p=2, **ADDRESS).invoke("Hi"))
