"""litellm, as a library."""

import asyncio
import os
from typing import Any

from common import TEXT, URL, raised

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the network before anything else
import litellm

litellm.suppress_debug_info = True


def say(words: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": words}]
    address = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
    return {"model": "openai/fake", "messages": messages, **address, **fields}


# -- in one piece
whole = litellm.completion(**say("Hi", n=2))
assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]
assert whole.choices[0].finish_reason == "stop"
cut = litellm.completion(**say("endless", max_tokens=5))
assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("hahah", "length")
text = litellm.text_completion(
    model="text-completion-openai/fake", prompt="Hi", max_tokens=100, api_base=f"{URL}/v1", api_key="none"
)
assert text.choices[0].text == TEXT

# -- in pieces
chunks = list(litellm.completion(**say("Hi", stream=True, stream_options={"include_usage": True})))
built = litellm.stream_chunk_builder(chunks)
assert (built.choices[0].message.content, built.choices[0].finish_reason) == (TEXT, "stop")
assert built.usage.prompt_tokens == whole.usage.prompt_tokens
assert built.usage.completion_tokens * 2 == whole.usage.completion_tokens


async def streamed(words: str) -> str:
    answer = await litellm.acompletion(**say(words, stream=True))
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


assert asyncio.run(streamed("Hi")) == TEXT

# -- errors: it must know which are worth another try, and which need another model
raised(litellm.NotFoundError, lambda: litellm.completion(**say("Hi") | {"model": "openai/gpt-4"}))
raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**say("x" * 600)))
raised(litellm.BadRequestError, lambda: litellm.completion(**say("Hi", top_p=2)))
raised(litellm.InternalServerError, lambda: litellm.completion(**say("break")))
broken = raised(
    litellm.exceptions.MidStreamFallbackError, lambda: list(litellm.completion(**say("break", stream=True)))
)
assert "could not be computed" in str(broken)
assert broken.generated_content == "abc"
