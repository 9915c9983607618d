"""What agents and other clients are told so that they use a server of this machine.

Each has an environment, arguments, and files in a directory of its own here: nothing of the user's
configuration is changed. What is not needed for that is switched off: reports of use, and requests
that only a service of the client's maker answers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvchat.cli.background import ServerFacts
from kvchat.core.toml_text import toml_value

# Any text will do where a server has no key, but no text at all would not.
_NO_KEY = "kvchat"
_OF_ANSWER = 4  # a quarter of the context may be an answer


@dataclass(frozen=True, slots=True)
class Launch:
    """How a client is started.

    variables   of its environment, beside those that there are
    arguments   before those of the user
    files       by their names in the client's directory
    """

    variables: dict[str, str]
    arguments: tuple[str, ...] = ()
    files: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its title, its program, and how it is started in a directory of its own.

    num_fixed   tokens of what it sends before any word of the user
    asking      arguments with which it answers one prompt and ends
    install     the command that installs it
    """

    title: str
    program: str
    num_fixed: int
    asking: tuple[str, ...]
    install: str
    launch: Callable[[ServerFacts, Path], Launch]


def _claude(server: ServerFacts, directory: Path) -> Launch:
    names = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{n}_MODEL" for n in _CLAUDE_NAMES))
    return Launch(
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key or _NO_KEY,
            "ANTHROPIC_API_KEY": "",
            **{f"ANTHROPIC_{name}": server.model for name in names},
            "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.context // _OF_ANSWER),
            # A line that differs at every request would make all behind it new.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }
    )


_CLAUDE_NAMES = ("HAIKU", "SONNET", "OPUS")


def _codex(server: ServerFacts, directory: Path) -> Launch:
    settings: dict[str, object] = {
        "model": server.model,
        "model_provider": "kvchat",
        "model_context_window": server.context,
        "model_auto_compact_token_limit": server.context * 9 // 10,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }
    provider: dict[str, object] = {
        "name": "kvchat",
        "base_url": f"{server.url}/v1",
        "env_key": "KVCHAT_API_KEY",
        "wire_api": "responses",
    }
    tables: dict[str, dict[str, object]] = {
        "model_providers.kvchat": provider,
        "agents": {"enabled": False},
        "analytics": {"enabled": False},
    }
    text = _toml(settings)
    for name, table in tables.items():
        text += f"\n[{name}]\n{_toml(table)}"
    variables = {"CODEX_HOME": str(directory), "KVCHAT_API_KEY": server.key or _NO_KEY}
    return Launch(variables, files={"config.toml": text})


def _toml(table: dict[str, object]) -> str:
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in table.items())


def _opencode(server: ServerFacts, directory: Path) -> Launch:
    limit = {"context": server.context, "output": server.context // _OF_ANSWER}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"kvchat/{server.model}",
        "small_model": f"kvchat/{server.model}",
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["kvchat"],
        "provider": {
            "kvchat": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "kvchat",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key or _NO_KEY},
                "models": {server.model: {"name": server.model, "limit": limit}},
            }
        },
    }
    return Launch({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(server: ServerFacts, directory: Path) -> Launch:
    return Launch(
        {
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": server.key or _NO_KEY,
            "OPENAI_MODEL": server.model,
            "GEMINI_TELEMETRY_ENABLED": "false",
        },
        ("--auth-type", "openai"),
    )


def _aider(server: ServerFacts, directory: Path) -> Launch:
    name = f"openai/{server.model}"
    facts = {
        name: {
            "max_input_tokens": server.context,
            "max_output_tokens": server.context // _OF_ANSWER,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    switches = ("--no-analytics", "--no-check-update", "--no-show-model-warnings")
    models = ("--model", name, "--weak-model", name)
    known = ("--model-metadata-file", str(directory / "models.json"))
    return Launch(
        {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": server.key or _NO_KEY},
        (*models, *known, *switches),
        {"models.json": json.dumps(facts)},
    )


def _llm(server: ServerFacts, directory: Path) -> Launch:
    # YAML takes the texts of JSON.
    entry = {"model_id": server.model, "model_name": server.model, "api_base": f"{server.url}/v1"}
    lines = [f"{name}: {json.dumps(value)}" for name, value in entry.items()]
    text = "- " + "\n  ".join([*lines, "api_key_name: kvchat", "supports_schema: true"]) + "\n"
    return Launch(
        {"LLM_USER_PATH": str(directory), "LLM_MODEL": server.model},
        files={
            "extra-openai-models.yaml": text,
            "keys.json": json.dumps({"kvchat": server.key or _NO_KEY}),
        },
    )


CLIENTS: dict[str, Client] = {
    "claude": Client(
        "Claude Code",
        "claude",
        18_000,
        ("-p",),
        "npm install -g @anthropic-ai/claude-code",
        _claude,
    ),
    "codex": Client(
        "Codex",
        "codex",
        6_000,
        ("exec", "--skip-git-repo-check"),
        "npm install -g @openai/codex",
        _codex,
    ),
    "opencode": Client(
        "opencode", "opencode", 7_000, ("run",), "npm install -g opencode-ai", _opencode
    ),
    "qwen": Client(
        "Qwen Code", "qwen", 17_000, ("-p",), "npm install -g @qwen-code/qwen-code", _qwen
    ),
    "aider": Client("aider", "aider", 2_000, ("--message",), "pipx install aider-chat", _aider),
    "llm": Client("llm", "llm", 0, (), "pipx install llm", _llm),
}
