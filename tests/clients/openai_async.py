"""OpenAI's own package in asynchronous programs, several requests at once."""

import asyncio
from typing import Any

import openai
from common import TEXT, URL, raised


def say(words: str, **fields: Any) -> Any:
    return {"model": "fake", "messages": [{"role": "user", "content": words}], **fields}


async def streamed(words: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30) as client:
        text = ""
        async for chunk in await client.chat.completions.create(**say(words, stream=True)):
            text += chunk.choices[0].delta.content or ""
        return text


async def main() -> None:
    assert await asyncio.gather(*(streamed(f"Hi {i}") for i in range(8))) == [TEXT] * 8
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30) as client:
        async with client.chat.completions.stream(**say("Hi")) as helper:
            deltas = [event.delta async for event in helper if event.type == "content.delta"]
            final = await helper.get_final_completion()
        assert "".join(deltas) == final.choices[0].message.content == TEXT

        stream = await client.chat.completions.create(**say("endless", stream=True))
        async for _ in stream:
            break
        await stream.close()
    assert await streamed("Hi") == TEXT


asyncio.run(main())
assert "could not be computed" in raised(openai.APIError, lambda: asyncio.run(streamed("break"))).message
