"""Commands on the model and its engine.

/model loads another model beside the current one. The conversation stays open. The current model
answers until the other is loaded, and stays if that cannot be loaded.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role as Speaker
from kvchat.chat.host import ChatHost
from kvchat.chat.turn_loop import LoadRelay
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.events import LoadEvent, LoadFailed, LoadProgress, ModelReady
from kvchat.core.stats import TierStatus
from kvchat.core.text import format_bytes, model_label, one_line
from kvchat.terminal import warmth
from kvchat.terminal.cache_lines import FIELD_COLUMNS, tier_lines
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.status import (
    StatsLevel,
    about,
    detail_line,
    format_count,
    graph_lines,
    plural,
    speculation_lines,
    stats_line,
)
from kvchat.terminal.theme import Look, Role
from kvchat.terminal.view import tell
from kvchat.tools.toolbox import Toolbox, call_in_words


async def _in_thread(make: Callable[[], ChatHost]) -> ChatHost:
    """Run a function on a daemon thread, so that a download does not delay the program's exit."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[ChatHost] = loop.create_future()

    def settle(host: ChatHost | None, error: Exception | None) -> None:
        if made.done():
            return
        if host is not None:
            made.set_result(host)
        else:
            made.set_exception(error or AssertionError("neither a host nor a reason"))

    def run() -> None:
        host, failure = None, None
        try:
            host = make()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, host, failure)

    threading.Thread(target=run, name="kvchat-model-change", daemon=True).start()
    return await made


async def change_model(context: "CommandContext", name: str) -> None:
    """Load a model, switch to it and close the old one; raises the error if that fails."""
    host = await load_host(context, name)
    try:
        cost = await context.controller.cost_with(host)
        if not await context.confirm_cost(cost, "/model", "reads"):
            await asyncio.to_thread(host.close)
            return
        old = context.controller.change_host(host)
    except BaseException:
        await asyncio.to_thread(host.close)
        raise
    say_model(context)
    session = context.controller.session
    for note in session.notes if session is not None else ():
        context.say(note)
    context.conversation_changed()
    await asyncio.to_thread(old.close)


async def load_host(
    context: "CommandContext", name: str, saved: Mapping[str, Any] | None = None
) -> ChatHost:
    """Return a host with another model, loaded; raises the error if that fails, or Stopped.

    saved   what a conversation with it was saved with, None for the settings of this process
    """
    controller = context.controller
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[ModelReady] = loop.create_future()
    relay = LoadRelay()
    async with context.page.lent(takes_interrupts=False):  # a download draws its own bars
        host = await _in_thread(lambda: controller.new_host(name, relay.hear, saved))

    def hear(event: LoadEvent) -> None:
        if outcome.done():
            return  # it was stopped: the thread that loads goes on to the end of its step
        if isinstance(event, LoadProgress):
            context.show_stage(one_line(event.stage))
        elif isinstance(event, LoadFailed):
            outcome.set_exception(event.error)
        elif isinstance(event, ModelReady):
            outcome.set_result(event)

    relay.attach(loop, hear)
    try:
        stays = f"{model_label(controller.host.model.name)} goes on."
        await context.stoppable(outcome, "loading the model", stays)
    except BaseException:
        await asyncio.to_thread(host.close)
        raise
    finally:
        context.show_stage("")
    return host


def say_model(context: "CommandContext") -> None:
    """Say which model answers from now on."""
    ready = context.controller.host.ready
    if ready is not None:
        context.say(f"Now with {one_line(ready.name)}, {_device_words(ready)}.")


_BAR_CELLS, _MIN_BAR_CELLS = 30, 8
MODEL_COLUMNS = 11  # "identity", the longest name of `describe_model`, and space after it


async def model(context: "CommandContext", arguments: str) -> None:
    """show the model and those on this machine, or go on with another"""
    if arguments in ("", "list"):
        lines = [] if arguments else [describe_model(context.controller), ""]
        found = await asyncio.to_thread(context.controller.surroundings.model_lines)
        lines += ["On this machine:", *(f"  {one_line(line, 200)}" for line in found)]
        lines.append("/model NAME goes on with another.")
        context.say("\n".join(lines), hanging=MODEL_COLUMNS)
        return
    await change_model(context, arguments)


_STATS_LEVELS = {"on": StatsLevel.LINE, "off": StatsLevel.OFF, "full": StatsLevel.ALL}


async def stats(context: "CommandContext", arguments: str) -> None:
    """figures of the last answer and the engine; on, off or full: those after answers"""
    if arguments in _STATS_LEVELS:
        context.say(context.set_stats(_STATS_LEVELS[arguments]))
        return
    if arguments not in ("", "last", "all"):
        raise UsageError(f"{one_line(arguments)} is unknown here.", "/stats [on|off|full]")
    lines = _last_stats(context) or ["This model has not answered yet."]
    status = await context.controller.engine.status()
    if status is not None:
        reused = f"{status.num_cached:,} of {status.num_blocks:,} blocks hold KV for reuse"
        total = format_bytes(status.device_bytes)
        kv = f" in {status.kv_dtype}" if status.kv_dtype else ""
        best, most = status.step_threads or (1, 1)
        steps = f", small steps on {best} of {plural(most, 'thread')}" if most > 1 else ""
        lines += [
            f"engine: {plural(status.num_steps, 'step')}, "
            f"{plural(status.num_tokens_computed, 'token')} computed{steps}",
            f"cache:  {reused}, {status.num_free:,} are free; all are {total}{kv}",
        ]
        if status.num_window_blocks:
            lines.append(
                f"        of the layers with a window, {status.num_free_window_blocks:,} of "
                f"{status.num_window_blocks:,} blocks are free"
            )
        if status.num_preempted or status.num_evicted:
            lines.append(
                f"        {plural(status.num_evicted, 'block')} evicted, "
                f"{plural(status.num_preempted, 'request')} put off"
            )
        if status.graphs is not None:
            lines += graph_lines(status.graphs)
        if status.speculation is not None:
            lines += speculation_lines(status.speculation)
        for tier in status.tiers:
            lines += tier_lines(await _as_it_is_now(context, tier))
    context.say("\n".join(lines), hanging=FIELD_COLUMNS)


async def _as_it_is_now(context: "CommandContext", tier: TierStatus) -> TierStatus:
    """Return a tier's status with a shared store's current size, as /cache shows it.

    The tier measured its size at its last write, and other processes write too.
    """
    kept = context.controller.kept
    with suppress(StoreError):  # the tier's status already holds the problem
        if kept is not None and tier.is_shared:
            return replace(tier, num_bytes=await asyncio.to_thread(kept.num_bytes))
    return tier


def _last_stats(context: "CommandContext") -> list[str]:
    """Return the figures of the last answer, with the reason for what was read again."""
    last, ready = context.controller.last, context.controller.host.ready
    if last is None or ready is None:
        return []
    glyphs = context.page.painter.look.glyphs
    why = context.controller.why_so_much(last)
    lines = [stats_line(last, ready.told_context_limit, glyphs), detail_line(last, glyphs, why)]
    return [line for line in lines if line]


async def spec(context: "CommandContext", arguments: str) -> None:
    """draft tokens ahead of the model: the same text, faster"""
    mode = {"on": "auto"}.get(arguments, arguments)
    if mode not in ("", "off", "auto", "ngram", "draft", "mtp"):
        raise UsageError(f"{one_line(arguments)} is unknown here.", "/spec on|off|ngram|draft|mtp")
    if mode:
        await asyncio.wrap_future(context.controller.host.speculate(mode))
        context.say(f"Drafts are {'off' if mode == 'off' else f'on: {mode}'}.")
        return
    status = await asyncio.wrap_future(context.controller.host.status())
    assert status.speculation is not None
    context.say("\n".join(speculation_lines(status.speculation)), hanging=FIELD_COLUMNS)


async def context_(context: "CommandContext", arguments: str) -> None:
    """how full the context is"""
    conversation = context.controller.require_conversation()
    path = conversation.path()
    used = sum(len(turn.token_ids) for turn in path)
    asked = sum(len(turn.token_ids) for turn in path if turn.role is Speaker.USER)
    ready = context.controller.host.ready
    limit = ready.told_context_limit if ready is not None else None
    turns = plural(sum(turn.is_message for turn in path), "turn")
    kv = _kv_words(ready) if ready is not None else ""
    some = about(context.controller.host.model)
    lines = [f"{some}{used:,} tokens: {asked:,} asked, {used - asked:,} answered, in {turns}{kv}"]
    if limit:
        share, left = used / limit, max(0, limit - used)
        shown = f"{some}{share:.0%} of {format_count(limit)}, {left:,} left"
        room = context.page.render_context.width - len(shown) - 1
        lines.append(f"{_bar(context.page.painter.look, share, room)}{shown}")
    cost = await context.controller.engine.cost(context.controller.context_ids)
    if cost is not None:
        lines.append(f"the next message is {warmth.sentence(cost)}")
    context.say("\n".join(lines))


def _bar(look: Look, share: float, room: int) -> str:
    """Return a bar and a space, or "" for spoken output and where there is no room for one."""
    cells = min(_BAR_CELLS, room)
    if look.is_spoken or cells < _MIN_BAR_CELLS:
        return ""
    full = min(cells, round(cells * share))
    return look.glyphs.bar_full * full + look.glyphs.bar_empty * (cells - full) + " "


def _context_words(limit: int | None) -> str:
    return f"{format_count(limit)} tokens" if limit is not None else "the server does not tell"


def _device_words(ready: ModelReady) -> str:
    form = f"in {ready.sent_as}" if ready.sent_as else ready.dtype
    return f"{ready.device}, {form}{_kv_words(ready)}"


def _kv_words(ready: ModelReady) -> str:
    """Return the dtype of the KV as the end of a sentence, "" if it is the model's own."""
    return f", KV in {ready.kv_dtype}" if ready.kv_dtype else ""


def describe_model(controller: ChatController) -> str:
    """Return the model's properties, one a line."""
    model, ready = controller.host.model, controller.host.ready
    facts = [("model", one_line(model.name)), ("template", str(model.format.strategy))]
    if ready is not None:
        facts += [
            ("device", _device_words(ready)),
            ("draft", one_line(ready.draft) if ready.draft else "none"),
            ("context", _context_words(ready.told_context_limit)),
            ("identity", ready.identity),
            ("loaded in", f"{ready.load_s:.1f} s"),
        ]
    return "\n".join(f"{name:<{MODEL_COLUMNS}}{value}" for name, value in facts)


_WORDS = {True: "runs at once", False: "never runs", None: "asks first"}


async def tools(context: CommandContext, arguments: str) -> None:
    """the tools that the model may call, and which of them ask first"""
    word, _, name = arguments.strip().partition(" ")
    toolbox = _require(context)
    if not word:
        _list(context, toolbox)
    elif word == "here":
        await _offer(context, toolbox)
    elif word in ("allow", "ask", "never"):
        _decide(context, toolbox, word, name.strip())
    else:
        known = "/tools [here|allow NAME|ask NAME|never NAME]"
        raise UsageError(f"{one_line(word, 20)} is unknown here.", known)


def _require(context: CommandContext) -> Toolbox:
    if context.toolbox is None:
        raise UsageError(
            "No tools are offered to the model.",
            "Start with --tools, and with a model whose template takes tools.",
        )
    return context.toolbox


def _list(context: CommandContext, toolbox: Toolbox) -> None:
    indent = "" if context.page.painter.look.is_spoken else "  "
    for tool in toolbox.tools:
        calls = toolbox.permissions.allowed_calls(tool.name)
        state = _WORDS[toolbox.permissions.of(tool.name)]
        state += f", but for {plural(len(calls), 'allowed call')}" if calls else ""
        tell(context.page, f"{one_line(tool.name)} ({state})", Role.TITLE, gap=False)
        description = f"{indent}{one_line(tool.description, 200)}"
        tell(context.page, description, gap=False, hanging=len(indent))
        for call in calls:
            allowed = f"{indent}runs at once: {call_in_words(call)}"
            tell(context.page, allowed, gap=False, hanging=len(indent))
    context.page.write([context.page.painter.text("")])
    if not toolbox.is_complete:
        context.say("MCP servers are starting; their tools come later.")
    if context.controller.has_other_tools:
        context.say("This conversation began with other tools, or none: /tools here offers these.")


async def _offer(context: CommandContext, toolbox: Toolbox) -> None:
    controller = context.controller
    if not controller.has_other_tools:
        context.say("These tools are offered here already.")
        return
    cost = await controller.engine.cost(controller.ids_with_tools(toolbox.definitions))
    if not await context.confirm_cost(cost, "/tools here"):
        return
    controller.set_tools(toolbox.definitions)
    context.say("The tools are offered in this conversation from now on.")
    context.conversation_changed()


def _decide(context: CommandContext, toolbox: Toolbox, word: str, name: str) -> None:
    if not toolbox.has(name):
        known = ", ".join(one_line(tool.name) for tool in toolbox.tools)
        raise UsageError(f"{one_line(name, 40) or 'Nothing'} is no tool; there are {known}.")
    permissions = toolbox.permissions
    permissions.always.discard(name)
    permissions.never.discard(name)
    permissions.forget_calls(name)
    if word != "ask":
        (permissions.always if word == "allow" else permissions.never).add(name)
    context.say(f"{one_line(name)} {_WORDS[permissions.of(name)]}.")


COMMANDS = (
    Command(
        model,
        Group.ENGINE,
        "[NAME|DIR|HF_ID|list]",
        ("list", "models"),
        argument=Argument.MODEL,
        subcommands=("list",),
    ),
    Command(
        stats,
        Group.ENGINE,
        "[on|off|full]",
        ("status",),
        takes_turn=False,
        subcommands=("on", "off", "full"),
    ),
    Command(
        spec,
        Group.ENGINE,
        "[on|off|auto|ngram|draft]",
        takes_turn=False,
        subcommands=("on", "off", "auto", "ngram", "draft"),
    ),
    Command(context_, Group.ENGINE, aliases=("tokens", "info"), takes_turn=False),
    Command(
        tools,
        Group.ENGINE,
        "[here|allow NAME|ask NAME|never NAME]",
        subcommands=("here", "allow", "ask", "never"),
    ),
)
