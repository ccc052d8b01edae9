"""What any client must do: read the stream with httpx on Trio, line by line, and parse each event.

python benchmarks/floor.py URL WHAT
"""

from __future__ import annotations

import json
import sys

import httpx
import trio


async def main(url: str, what: str) -> None:
    """Read one reply; print how many tokens it had."""
    tokens = 0
    body = {"messages": [{"role": "user", "content": what}], "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    tokens += 1
    print(tokens)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
