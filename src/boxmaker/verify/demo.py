"""The verification against the embedded server, which is forced to play its part.

Server, tokenizer, slots, cache and figures are real; what the model says is a script, because a toy
model calls no tools. Source: design.md section 11.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from boxmaker.config import at_home, load_config
from boxmaker.demo.run import embedded_server, toml_text
from boxmaker.testing.forced import ForcedReply, forced_server
from boxmaker.verify.device import Verification
from boxmaker.verify.judge import Check

SCRIPT = (
    ForcedReply(content="Hello, owner.", reasoning="A greeting."),
    ForcedReply(calls=[("clock", {})], reasoning="The clock knows."),
    ForcedReply(content="It is a quarter past two."),
    ForcedReply(calls=[("find_tool", {"query": "echo"})], content="Let me look."),
    ForcedReply(calls=[("call_tool", {"name": "echo", "arguments": {"text": "boxmaker"}})]),
    ForcedReply(content="It said: boxmaker", reasoning="Done."),
    ForcedReply(content="We greeted, read the clock, and used echo.", reasoning="Three turns."),
    ForcedReply(content=" ".join(f"And {number}." for number in range(1, 150))),
    ForcedReply(content="Done."),
)
"""What the model says, a reply a completion, in the order in which the verification asks."""

CONFIG = """\
[server]
url = {url}
[request]
max_tokens = 1024
"""


async def verify_demo(directory: Path, say: Callable[[Check], None]) -> bool:
    """Run every check on the forced embedded server; True when all hold.

    Raises:
        StartError: the embedded server did not start.

    Cancellation: safe at any point; the server is ended.
    """
    # Its start blocks: nothing else runs yet.
    with embedded_server(directory / "server.log") as url:
        async with forced_server(url) as server:
            server.replies = list(SCRIPT)
            file = directory / "config.toml"
            file.write_text(CONFIG.format(url=toml_text(server.url)), "utf-8")
            home = directory / "home"
            home.mkdir(mode=0o700)
            config = load_config(file, {})
            return await Verification(owner=config, config=at_home(config, home), say=say).run()
