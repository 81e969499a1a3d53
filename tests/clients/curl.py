"""curl, as shell scripts use it."""

import json
import subprocess
from typing import Any

from common import TEXT, URL

CHAT = "/v1/chat/completions"


def curl(path: str, *options: str, data: bytes | None = None) -> tuple[int, bytes]:
    """Status and body."""
    if data is not None:
        options = (*options, "--data-binary", "@-")
    command = ["curl", "--silent", "--show-error", "--max-time", "30", "--write-out", "\n%{http_code}", *options]
    done = subprocess.run([*command, URL + path], input=data, capture_output=True, check=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def say(words: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": words}], **fields}).encode()


JSON = ("--header", "Content-Type: application/json")

status, body = curl(CHAT, *JSON, data=say("Hi"))
assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, TEXT)

for options in ((), ("--http1.0",), ("--compressed",)):
    status, body = curl(CHAT, "--no-buffer", *JSON, *options, data=say("Hi", stream=True))
    events = body.decode("ascii").split("\n\n")
    assert (status, events[-2:]) == (200, ["data: [DONE]", ""]), events
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT

# A body that is too long is answered before it is read, however it comes.
for header in ("Expect:", "Expect: 100-continue", "Transfer-Encoding: chunked"):
    for size in (30_000, 3_000_000):
        status, body = curl(CHAT, *JSON, "--header", header, data=say("x" * size))
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large"), (header, size)

status, body = curl(CHAT, data=say("Hi"))  # curl's own content type
assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")
status, body = curl("/health", "--head")
assert status == 200
assert b"content-length" in body.lower()
status, body = curl(CHAT, "--request", "OPTIONS")
assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
status, body = curl("/v1/models/a%2Fb%ff")
assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
