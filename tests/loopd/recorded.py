"""Recordings of whole self-tests against real llama-servers with several chat templates.

`python -m tests.loopd.recorded` makes them again: it starts the embedded server with each template and
keeps every answer, byte for byte, under the request that it answers. The templates are ours, in
the manner of families that people run. Replaying refuses a request that was not recorded, so a
self-test that asks something new has to be recorded anew.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from boxmaker.demo.server import chat_template, find_model
from boxmaker.inference.client import Client
from boxmaker.loopd.selftest import run_selftest
from boxmaker.testing.daemon import make_config
from boxmaker.testing.server import Received, read_request
from boxmaker.tools.fake import fake_registry

SERVERS = Path(__file__).parents[2] / "fixtures" / "servers"

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}"
_END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_TOOLS = "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '\\n' }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
_ALTERNATES = """
{%- set ns = namespace(last='') -%}
{%- for m in messages -%}
{%- if m.role == 'user' and ns.last in ('user', 'tool') -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set ns.last = m.role -%}
{%- endfor -%}
"""
_STRIPS = """
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""

TEMPLATES: dict[str, tuple[str, int]] = {
    "prefix-stable": (chat_template(), 2),
    "one-slot": (chat_template(), 1),
    "strips-old-reasoning": (
        _STRIPS + _TOOLS + "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.reasoning_content and loop.index0 > ns.last_user %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}" + _CALLS +
        "{{ '<|im_end|>\\n' }}{% endfor %}" + _END,
        2,
    ),
    "users-alternate": (
        _ALTERNATES + _TOOLS + "{% for m in messages %}" + _CALLS + _TURN + "{% endfor %}" + _END, 2
    ),
    "no-tools": ("{% for m in messages %}" + _TURN + "{% endfor %}" + _END, 2),
    "refuses-tool-results": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no such role: tool') }}"
        "{% endif %}" + _TURN + "{% endfor %}" + _END,
        2,
    ),
    "drops-system": (
        _TOOLS + "{% for m in messages if m.role != 'system' %}" + _CALLS + _TURN + "{% endfor %}" + _END, 2
    ),
}  # fmt: skip
"""Name to chat template and number of slots."""

CHILD = """
import sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.chat_template, p.use_jinja = sys.argv[1], open(sys.argv[2]).read(), True
p.n_parallel, p.n_ctx, p.kv_unified, p.verbosity, p.ui = int(sys.argv[3]), 2048 * int(sys.argv[3]), False, 0, False
s = xllamacpp.Server(p)
print(s.listening_address, flush=True)
sys.stdin.read()
"""


async def read_named(stream: trio.SocketStream) -> tuple[Received, str]:
    """A request, and the name that its answer is kept under."""
    request = await read_request(stream)
    assert request is not None
    return request, f"{request.method} {request.path} {hashlib.sha256(request.body).hexdigest()}"


@asynccontextmanager
async def replaying(kind: str) -> AsyncIterator[str]:
    """Serve a recording; gives the address."""
    answers: dict[str, str] = json.loads((SERVERS / f"{kind}.json").read_text("utf-8"))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            _, name = await read_named(stream)
            assert name in answers, f"{kind}: {name} was not recorded; run python -m tests.loopd.recorded"
            await stream.send_all(answers[name].encode("latin-1"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def record(kind: str, url: str, directory: Path) -> None:
    """Run a self-test against a real server, and keep what it answers."""
    answers: dict[str, str] = {}
    host, port = url.removeprefix("http://").split(":")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def forward(stream: trio.SocketStream) -> None:
        async with stream, await trio.open_tcp_stream(host, int(port)) as server:
            request, name = await read_named(stream)
            await server.send_all(request.raw())
            answer = b""
            while piece := await server.receive_some(65536):
                answer += piece
            answers[name] = answer.decode("latin-1").replace(str(find_model()), "/models/model.gguf")
            await stream.send_all(answer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, forward, listeners)
        config = make_config(directory, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
        async with Client(config) as client:
            report = await run_selftest(config, client, fake_registry())
        for check in report.checks:
            print(f"{kind:22}{check.line()}")
        nursery.cancel_scope.cancel()
    fixed = {name: _with_length(answer) for name, answer in answers.items()}
    (SERVERS / f"{kind}.json").write_text(json.dumps(fixed, indent=1, sort_keys=True) + "\n", "utf-8")


def _with_length(answer: str) -> str:
    """Content-Length again, after the model's path was replaced."""
    head, _, body = answer.partition("\r\n\r\n")
    lines = [
        f"Content-Length: {len(body.encode('latin-1'))}" if line.lower().startswith("content-length:") else line
        for line in head.split("\r\n")
    ]
    return "\r\n".join(lines) + "\r\n\r\n" + body


def main() -> None:
    for kind, (template, slots) in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "template").write_text(template, "utf-8")
            command = [sys.executable, "-c", CHILD, str(find_model()), str(directory / "template"), str(slots)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
                assert server.stdout is not None
                trio.run(record, kind, server.stdout.readline().decode().strip(), directory)
                server.terminate()


if __name__ == "__main__":
    main()
