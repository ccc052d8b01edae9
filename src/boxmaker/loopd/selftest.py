"""The self-test: is the server one that a session can live on, and is the home ours?

It runs no completion: that would evict the cache that a restarted daemon is about to need.
Source: design.md section 7 "The self-test".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import trio
from attrs import define, evolve, field, frozen

from boxmaker.config import Config
from boxmaker.errors import InferenceError, StorageError, printable, shell_word
from boxmaker.inference.client import LOADING_LOOK_S, Client
from boxmaker.inference.facts import (
    ANSWERED,
    PROBE_RESULT,
    PROBE_SYSTEM,
    TOOL_TURN,
    ServerFacts,
    find_alternate,
    limits_of,
    probe,
    prompt_of,
    render,
    render_body,
)
from boxmaker.inference.families import family_of, heeds_preserve_reasoning
from boxmaker.inference.request import chat_template_kwargs
from boxmaker.inference.retry import is_loading
from boxmaker.loopd.home import exposed_directory, home_problem, lock_holder
from boxmaker.loopd.saving import is_open_to_all, save_dir_problem
from boxmaker.proto.chat import Assistant, ChatMessage, System, ToolSchema
from boxmaker.session.baseline import Baseline, assemble_baseline, read_system_text
from boxmaker.tools.registry import Registry

ROOM_FOR_REPLY_TOKENS = 512
KEY_REMEDY = "Put its --api-key into the file that [server] api_key_file names"


def warm_flags(slots: Sequence[int]) -> str:
    """llama-server flags that keep pinned slots' caches, with a slot for others, and make a cancel in prefill quick."""
    return f"-np {max(slots) + 2} --no-kv-unified -b 256"


@frozen(kw_only=True)
class Check:
    """One line of the self-test."""

    name: str
    state: Literal["ok", "warn", "fail"]
    message: str
    remedy: str = ""

    def line(self) -> str:
        """The check as a person reads it."""
        return printable(f"{self.state:4}  {self.name}: {self.message}" + (f". {self.remedy}" if self.remedy else ""))


@define
class Report:
    """What the self-test found."""

    checks: list[Check] = field(factory=list)
    facts: ServerFacts = field(factory=ServerFacts)

    @property
    def failed(self) -> bool:
        """Does any check fail?"""
        return any(check.state == "fail" for check in self.checks)

    def ok(self, name: str, message: str) -> None:
        """Note a check that holds."""
        self.checks.append(Check(name=name, state="ok", message=message))

    def warn(self, name: str, message: str, remedy: str) -> None:
        """Note something that works, but not well."""
        self.checks.append(Check(name=name, state="warn", message=message, remedy=remedy))

    def fail(self, name: str, message: str, remedy: str) -> None:
        """Note something that must be mended first."""
        self.checks.append(Check(name=name, state="fail", message=message, remedy=remedy))


async def run_selftest(config: Config, client: Client, registry: Registry) -> Report:
    """Check home, baseline and server; never raises for what it finds.

    Waits up to `[retry] loading_s` while the model loads. Checks that need a server which does not
    answer are left out.

    Cancellation: safe at any point; nothing was changed.
    """
    report = Report()
    _check_home(report, config.paths.home)
    _check_max_tokens(report, config)
    _check_save_dir(report, config.slots.save_dir)
    baseline = _check_baseline_files(report, config, registry)
    try:
        props = await _check_server(report, config, client)
        if props is None:
            return report
        report.facts.model = props.get("model_alias") if isinstance(props.get("model_alias"), str) else None
        report.facts.saw_props(props)
        n_ctx = await _check_slot(report, config, client, props)
        await _check_saving(report, config, client)
        await _check_template(report, config, client, props, registry)
        if baseline is not None:
            await _check_budget(report, config, client, baseline, n_ctx)
    except InferenceError as exc:
        if exc.status == 401:
            report.fail("server", f"{config.server.url} refuses the key", KEY_REMEDY)
        else:
            report.fail("server", str(exc), "Is it a llama-server, and is it still running?")
        return report
    if not props and all(
        check.state != "ok" for check in report.checks if check.name.split()[0] in ("slot", "template")
    ):
        report.fail(
            "server",
            f"{config.server.url} is no llama-server: it has neither /props nor /slots nor /apply-template",
            "Mend [server] url",
        )
    return report


def _check_home(report: Report, home: Path) -> None:
    problem = home_problem(home)
    holder = lock_holder(home) if problem is None else None
    if problem:
        report.fail("home", problem, "Mend it, or set [paths] home")
    elif not home.exists():
        report.ok("home", f"{home} will be made")
    else:
        ours = holder == f"pid {os.getpid()}"
        exposed = exposed_directory(home)
        note = ", locked by this loopd" if ours else f", served by a running loopd, {holder}" if holder else ""
        if exposed is not None:
            remedy = f"Run: chmod o-w {shell_word(exposed)}"
            report.warn("home", f"{home}{note}; everybody can write to {exposed}, and so replace what is in it", remedy)
        else:
            report.ok("home", f"{home}{note}")


def _check_save_dir(report: Report, directory: Path | None) -> None:
    if directory is None:
        return
    problem = save_dir_problem(directory)
    if problem is not None:
        remedy = "Make it a directory that loopd may write and remove in, and start llama-server with it as"
        report.fail("save_dir", f"{directory}: {problem}", f"{remedy} --slot-save-path; or take [slots] save_dir out")
    elif is_open_to_all(directory):
        remedy = f"Run: chmod o-rwx {shell_word(directory)}"
        report.warn("save_dir", f"{directory}: everybody may enter it and read the conversations saved there", remedy)
    else:
        report.ok("save_dir", f"{directory}")


def _check_max_tokens(report: Report, config: Config) -> None:
    if not config.thinking.enabled:
        return
    least = config.thinking.cap + ROOM_FOR_REPLY_TOKENS
    for key in ("max_tokens", "max_completion_tokens", "n_predict"):
        value = config.request.get(key)
        if type(value) is int and 0 <= value < least:
            report.warn(
                "max_tokens",
                f"[request] {key} = {value} counts reasoning too, and leaves no room for an answer after it",
                f"Set it to {least} or more, or lower [thinking] cap",
            )


def _check_baseline_files(report: Report, config: Config, registry: Registry) -> Baseline | None:
    try:
        _, packaged = read_system_text(config.baseline)
        baseline = assemble_baseline(config.baseline, config.paths.home, registry.core_schemas())
    except StorageError as exc:
        report.fail("system.md", str(exc), "Mend the file, or [baseline] system")
        return None
    if packaged:
        report.warn(
            "system.md", f"there is no {config.baseline.system}, the packaged one is used", "Write your own there"
        )
    else:
        report.ok("system.md", f"{config.baseline.system}")
    return baseline


async def _check_server(report: Report, config: Config, client: Client) -> dict[str, Any] | None:
    """Reach the server, waiting while it loads; give its `/props` (empty when it has none).

    Raises:
        InferenceError: status 401.
    """
    url = config.server.url
    began = trio.current_time()
    while True:
        try:
            answer = await probe(client, "GET", "/props")
        except InferenceError as exc:
            if exc.status == 401:
                raise
            report.fail("server", f"{url}: {exc}", "Start llama-server, or mend [server] url")
            return None
        if answer.status == 503 and is_loading(answer.error()):
            if trio.current_time() - began >= config.retry.loading_s:
                report.fail(
                    "server", f"{url} was still loading after {config.retry.loading_s} s", "Raise [retry] loading_s"
                )
                return None
            await trio.sleep(LOADING_LOOK_S)
            continue
        break
    if answer.status == 200 and not isinstance(answer.value, dict):
        report.fail("server", f"{url} is no llama-server: /props is no JSON object", "Mend [server] url")
        return None
    if answer.status != 200:
        report.warn(
            "server", f"{url} answers /props with {answer.status}: it may be no llama-server", "Check [server] url"
        )
        return {}
    report.ok("server", url)
    props: dict[str, Any] = answer.value
    return props


async def _check_slot(report: Report, config: Config, client: Client, props: dict[str, Any]) -> int | None:
    """Does each of our slots exist? An id out of range would wrap in silence. Gives the least `n_ctx` of them."""
    n_ctx, total = limits_of(props)
    answer = await probe(client, "GET", "/slots")
    if answer.status == 200 and isinstance(answer.value, list):
        slots = {e["id"]: e for e in answer.value if isinstance(e, dict) and type(e.get("id")) is int}
        total = len(slots)
    else:
        slots = {}
        report.warn(
            "slots",
            f"the server does not show its slots ({answer.status}): loopd cannot see whether ours is busy",
            "Start llama-server with --slots, and let nothing else use the slot",
        )
    least: list[int] = []
    for slot in config.slots.listed:
        listed = slots.get(slot, {}).get("n_ctx")
        of_slot = listed if type(listed) is int else n_ctx
        if of_slot is not None:
            least.append(of_slot)
        name = "slot" if len(config.slots.listed) == 1 else f"slot {slot}"
        _check_one_slot(report, config, name, slot, total, of_slot)
    return min(least, default=None)


async def _check_saving(report: Report, config: Config, client: Client) -> None:
    """Was the server started so that it saves slots? It is asked to do what it does not know."""
    if config.slots.save_dir is not None:
        answer = await probe(client, "POST", f"/slots/{config.slots.listed[0]}?action=none", {})
        if answer.status != 400:  # 400: it knows no such action, so it would do those that there are
            report.warn(
                "saving",
                f"the server saves no slots ({answer.status})",
                f"Start llama-server with --slot-save-path {shell_word(config.slots.save_dir)}/",
            )


def _check_one_slot(report: Report, config: Config, name: str, slot: int, total: int | None, n_ctx: int | None) -> None:
    if total:
        if slot >= total:
            report.fail(
                name,
                f"slot {slot} does not exist, the server has {total}",
                "Set [slots] main to 0" + (f" to {total - 1}" if total > 1 else ""),
            )
        elif total == 1:
            report.warn(
                name,
                "the server has one slot: any other client takes its cache",
                f"Flags that keep it warm: {warm_flags(config.slots.listed)}",
            )
        else:
            report.ok(name, f"slot {slot} of {total}" + (f", {n_ctx} tokens" if n_ctx else ""))
    else:
        report.warn(name, f"the server does not say how many slots it has; slot {slot} is used", "Check [server] url")


async def _check_template(
    report: Report, config: Config, client: Client, props: dict[str, Any], registry: Registry
) -> None:
    """Does the template take what a turn sends; must users alternate; is it prefix-stable?"""
    tools = registry.core_schemas()
    alternate = await find_alternate(client, config, tools)
    report.facts.alternate = alternate
    answer = await render(client, config, TOOL_TURN, tools, alternate)
    prompt = prompt_of(answer)
    if prompt is None:
        if answer.status in (400, 500):
            report.fail(
                "template",
                f"the chat template refuses a conversation with tools: {answer.error()}",
                "Start llama-server with --jinja and a template that takes tools",
            )
        else:
            report.warn(
                "template",
                f"cannot be checked: /apply-template answers {answer.status}",
                "Use a llama-server that has it, or make sure that the template takes tools",
            )
        return
    missing = [
        what
        for what, texts in (
            ("the system message", [PROBE_SYSTEM]),
            ("the tools", [tool.name for tool in tools]),  # all: the conversation itself names one, in its call
            ("tool results", [PROBE_RESULT]),
        )
        if not all(text in prompt for text in texts)
    ]
    if missing:
        report.fail(
            "template",
            f"the chat template leaves out {' and '.join(missing)}",
            "Start llama-server with --jinja and a template that takes tools",
        )
        return
    report.ok("template", "takes a system message, tools and tool results" + (", users alternate" if alternate else ""))
    await _check_prefix(report, config, client, props, tools, alternate)


async def _check_prefix(
    report: Report,
    config: Config,
    client: Client,
    props: dict[str, Any],
    tools: Sequence[ToolSchema],
    alternate: bool,
) -> None:
    """Render a conversation with reasoning and a call, then a longer one: the first must be a prefix."""
    shorter = with_reasoning(TOOL_TURN, thinking=config.thinking.enabled)
    longer = with_reasoning(ANSWERED, thinking=config.thinking.enabled)
    before = prompt_of(await render(client, config, shorter, tools, alternate))
    after = prompt_of(await render(client, config, longer, tools, alternate))
    if before is None or after is None:
        return
    same = common_prefix(before, after)
    if same == len(before):
        report.ok("prefix", "the template keeps what was sent: a session's cache holds")
        return
    place = f"(from character {same} of {len(before)})"
    if same >= before.rfind(PROBE_RESULT) + len(PROBE_RESULT):
        problem = (
            f"the template ends a prompt {place} with what it does not put in front of"
            " the answer later: the server re-reads each answer"
        )
    else:
        problem = f"the template rewrites earlier messages {place}: the server re-reads them at each new user message"
    report.warn("prefix", problem, _prefix_remedy(config, props))


def _prefix_remedy(config: Config, props: dict[str, Any]) -> str:
    """What keeps a session's cache with such a template, and what that costs."""
    price = f"up to {config.thinking.cap} tokens of reasoning a reply" if config.thinking.enabled else "a few a reply"
    family = family_of(props.get("chat_template"))
    if heeds_preserve_reasoning(props):
        if chat_template_kwargs(config)["preserve_reasoning"] is True:
            keys = "[request] chat_template_kwargs or a flag of the server overrides preserve_reasoning"
            remedy = f"{keys} (clear_thinking does): take it out"
        else:
            remedy = "Take preserve_reasoning out of [request] chat_template_kwargs: it is true by itself"
    elif family is not None:
        remedy = (
            f"Start llama-server with --chat-template-file templates/{family.template} of boxmaker's source:"
            f" {family.name}'s own, but prefix-stable"
        )
    else:
        return "boxmaker has no template for this family: use one that keeps reasoning; `bxctl cache` tells each loss"
    return f"{remedy}. Its price is context: {price} stay in it"


def with_reasoning(messages: Sequence[ChatMessage], *, thinking: bool) -> tuple[ChatMessage, ...]:
    """The same conversation as a model that thinks has it, with reasoning in its replies."""
    return tuple(
        evolve(message, reasoning_content="Probe of reasoning.")
        if isinstance(message, Assistant) and thinking
        else message
        for message in messages
    )


def common_prefix(one: str, other: str) -> int:
    """How many characters two texts have in common from their start."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


async def _check_budget(report: Report, config: Config, client: Client, baseline: Baseline, n_ctx: int | None) -> None:
    tokens = await count_baseline(client, config, baseline)
    if tokens is None:
        report.warn("baseline", "its tokens cannot be counted by this server", "Keep system.md and core.md short")
        return
    budget = config.baseline.token_budget
    if tokens > budget:
        report.fail(
            "baseline",
            f"{tokens} tokens, allowed are {budget}",
            "Shorten system.md or memory/core.md, or raise [baseline] token_budget",
        )
    elif n_ctx is not None and tokens + ROOM_FOR_REPLY_TOKENS > n_ctx:
        report.fail(
            "baseline",
            f"{tokens} tokens leave no room in a slot of {n_ctx}",
            "Start llama-server with a larger -c, or shorten system.md",
        )
    else:
        report.ok("baseline", f"{tokens} tokens of {budget} allowed")


async def count_baseline(client: Client, config: Config, baseline: Baseline) -> int | None:
    """Count the baseline's tokens with the server's own tokenizer; None when it has no way."""
    body = render_body(config, [System(content=baseline.system)], baseline.tools, alternate=False)
    body["add_generation_prompt"] = False
    answer = await probe(client, "POST", "/v1/chat/completions/input_tokens", body)
    if answer.status == 200 and isinstance(answer.value, dict) and type(answer.value.get("input_tokens")) is int:
        counted: int = answer.value["input_tokens"]
        return counted
    prompt = prompt_of(await probe(client, "POST", "/apply-template", body))
    if prompt is None:
        return None
    answer = await probe(client, "POST", "/tokenize", {"content": prompt, "add_special": True})
    if answer.status == 200 and isinstance(answer.value, dict) and isinstance(answer.value.get("tokens"), list):
        return len(answer.value["tokens"])
    return None
