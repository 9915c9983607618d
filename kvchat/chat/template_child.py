"""The process that renders a checkpoint's chat template: one JSON line in, one out.

A template is a program from somewhere: it may loop for ever, make gigabytes, or overflow a stack,
within one call that no thread can be kept from. Here the kernel ends it. Runs as a program, started
by `template_process.py`; knows no tokens and no conversation.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from kvchat.chat.jinja import CompiledTemplate, TemplateFailed, compile_template

_SHORTEST_S = 0.01  # nothing at all would set no timer


def main(cpu_limit_s: float, memory_bytes: int, text_bytes: int) -> None:
    """Answer requests until standard input ends.

    The first has the template's source. Work of more than `cpu_limit_s` on one request, or than the
    request's own `limit_s`, ends the process by SIGPROF: seconds of the processor, so that a busy
    machine makes no difference. Text of more than `text_bytes` is refused.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    template: CompiledTemplate | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            request = json.loads(line)
            allowed_s = min(request.get("limit_s") or cpu_limit_s, cpu_limit_s)
            signal.setitimer(signal.ITIMER_PROF, max(allowed_s, _SHORTEST_S))
            if template is None:
                template, reply = compile_template(request["source"]), {}
            else:
                reply = {"text": _render(template, request, text_bytes)}
        except TemplateFailed as error:
            reply = {"failed": " ".join(str(error).split())[:500]}
        except MemoryError:
            reply = {"failed": f"it needs more than {memory_bytes >> 20} MiB of memory"}
        answer = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process; a system without it, or with a lower one, keeps its own."""
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most, most))


def _render(template: CompiledTemplate, request: dict[str, Any], text_bytes: int) -> str:
    clock = datetime.fromisoformat(request["clock"])
    text = template.render(request["messages"], request["variables"], clock, True)
    if len(text) > text_bytes or len(text.encode("utf-8", "surrogatepass")) > text_bytes:
        raise TemplateFailed(f"it writes more than {text_bytes >> 20} MiB")
    return text
