"""Small chat templates, one for each habit that real ones have."""

_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"

CHATML = "{% for m in messages %}" + _TURN + "{% endfor %}" + _GENERATION
# What the checkpoints of tests have: other marks, behind a first token.
CHAT_TEMPLATE = "{{ bos_token }}" + CHATML.replace("<|im_", "<|")

# A default system prompt with a date in it, as Llama 3.2's.
DATED = (
    "{{ bos_token }}{% set dated = 'Today is ' + strftime_now('%d %b %Y') + '.' %}"
    "{% if messages[0].role == 'system' %}{% set dated = dated + ' ' + messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "<|im_start|>system\n{{ dated }}<|im_end|>\n" + CHATML
)

# Thinking is dropped from answers before the last user turn, as Qwen 3's.
THINK_STRIPPING = (
    "{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>\n"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _GENERATION
)

# White space around messages is dropped, as Llama 3's and Gemma's.
TRIMMING = CHATML.replace("m.content", "m.content | trim")

# Only the system prompt is trimmed, and only at its end, as SmolLM3's.
TRIMMING_SYSTEM = CHATML.replace(
    "m.content", "(m.content.rstrip() if m.role == 'system' else m.content)"
)

# Messages are lists of parts, as SmolVLM's, LLaVA's, and those of one part.
PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
)
CHOSEN_PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
)
FIRST_PART = CHATML.replace("m.content", "m.content[0]['text']")
REFUSES_TEXT = "{% if messages[0].content is string %}{{ raise_exception('parts') }}{% endif %}"
REFUSES_TEXT += FIRST_PART
PARTS_OF_USERS = CHATML.replace(
    "m.content", "(m.content[0]['text'] if m.role == 'user' else m.content)"
)
# It writes a list of parts as it is.
WRITES_PARTS = CHATML.replace("m.content", "'' if m.content is string else m.content")

# The system prompt stands in front of the last user turn, as Mistral's.
SYSTEM_GLUED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n"
    "{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)

# No system role, as Gemma's.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + CHATML
)

# System messages are passed over in silence.
IGNORES_SYSTEM = (
    "Exact text:\n{% for m in messages if m.role != 'system' %}"
    + _TURN
    + "{% endfor %}"
    + _GENERATION
)

# Nothing opens the answer, as some old ones.
NO_GENERATION_PROMPT = "{% for m in messages %}" + _TURN + "{% endfor %}"

# The opening ends inside a mark of thinking, as DeepSeek R1's.
OPENS_THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")

# Text, not a token, closes an answer.
TEXT_ONLY = (
    "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)

RAISES_ON_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('one turn only') }}"
    "{% endif %}{% endfor %}" + CHATML
)
RAISES_ALWAYS = "{{ raise_exception('not for chatting') }}"
RAISES_ON_THINKING = (
    "{% for m in messages %}{% if '<think>' in m.content %}{{ raise_exception('no thoughts') }}"
    "{% endif %}{% endfor %}" + CHATML
)
SHOUTING = CHATML.replace("m.content", "m.content | upper")
DROPS_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'user' %}" + _TURN + "{% endif %}{% endfor %}"
)
ONLY_THE_LAST = "{% for m in messages[-1:] %}" + _TURN + "{% endfor %}" + _GENERATION

# `enable_thinking` puts an empty thought before the answer, as Qwen 3's.
TOGGLED = CHATML.replace(
    "assistant\n{% endif",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif",
)

# Another name, with a default of its own, as Granite's; switched on, the prompt opens a mark.
DEFAULTED = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}"
    + CHATML.replace(
        "assistant\n{% endif", "assistant\n{% if thinking %}<think>\n{% endif %}{% endif"
    )
)

# An effort stands in the system message that the template writes itself, as gpt-oss's.
EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "<|im_start|>system\nReasoning: {{ reasoning_effort }}<|im_end|>\n" + CHATML
)

# An effort that may be none, as Mistral's.
EFFORT_OR_NONE = (
    "{% set effort = reasoning_effort or 'none' %}"
    "[{{ 'high' if effort == 'high' else 'none' }}]" + CHATML
)

# White space stands on both sides of an answer, as Llama 2's.
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)

# A line ends before the token that closes an answer, as Apriel's.
LINE_BEFORE_END = CHATML.replace("<|im_end|>\n{% endfor", "\n<|im_end|>\n{% endfor")

# The prompt opens a mark, and the history shows none, as Qwen 3.5's and DeepSeek R1's.
THINKS_THEN_FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}"
)

# The history shows an empty thought where the prompt opens one, as GLM 4.7's.
CLOSES_THOUGHTS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% else %}<|im_end|></think>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|><think>{% endif %}"
)

# The history shows an empty thought where the prompt leaves it open to think, as GLM 4.5's.
EMPTY_THOUGHTS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% else %}<|im_end|>\n<think></think>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>{% endif %}"
)

# An answer has the header of a channel, which the model writes itself, as gpt-oss's.
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# A word in the system prompt switches thinking, and is taken out of it, as SmolLM 3's.
READS_WORDS = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    "<|im_start|>system\n{{ system.replace('/no_think', '').rstrip() }}"
    "[{{ 'no thoughts' if '/no_think' in system else 'thoughts' }}]<|im_end|>\n"
    + CHATML.replace(
        "assistant\n{% endif",
        "assistant\n{% if '/no_think' in system %}<think>\n\n</think>\n{% endif %}{% endif",
    )
)

# Templates with tools: definitions first, then a system message if there is one.
_DEFINED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_TALK_WITH_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}RESULT{% elif m.tool_calls %}CALLED"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}"
)


def _with_tools(called: str, result: str) -> str:
    talk = _TALK_WITH_TOOLS.replace("RESULT", result).replace("CALLED", called)
    return _DEFINED + talk + _GENERATION


# JSON objects between tags, as Qwen 2.5's and Hermes'.
TOOLS_AS_JSON = _with_tools(
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n",
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
)

# An element for each argument, as Qwen 3 Coder's; results are stripped.
TOOLS_AS_ELEMENTS = _with_tools(
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n",
    "<|im_start|>user\n{{ m.content | trim }}<|im_end|>\n",
)

# Pairs of keys and values, and no token that closes an answer, as GLM 4.5's.
TOOLS_AS_PAIRS = _with_tools(
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>"
    "{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}"
    "</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}",
    "<|im_start|>observation\n{{ m.content }}",
)

# One bare JSON object and no text beside it; results are JSON texts, as Llama 3's.
TOOLS_BARE = _with_tools(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|im_start|>assistant\n{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|im_end|>\n',
    "<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>\n",
)

# A mark, then a list; ids of nine characters; text beside calls is refused, as Mistral's.
TOOLS_MARKED = _with_tools(
    "{% if m.content %}{{ raise_exception('text and calls') }}{% endif %}<|im_start|>assistant\n"
    "[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine characters') }}{% endif %}{{ c.function | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>",
    "<|im_start|>[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
)

# A channel with the name of the tool, and another closing token than other answers, as gpt-oss'.
TOOLS_IN_CHANNELS = _with_tools(
    "<|im_start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary "
    "json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}</s>",
    "<|im_start|>functions.{{ m.name }}<|message|>{{ m.content | tojson }}<|im_end|>\n",
).replace("assistant\n{% endif", "assistant{% endif")

# It needs the arguments as text.
TOOLS_WITH_TEXT = TOOLS_AS_JSON.replace(
    "{{ c.function | tojson }}",
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments + "" }}}',
)

TOOLS = {
    "json": TOOLS_AS_JSON,
    "elements": TOOLS_AS_ELEMENTS,
    "pairs": TOOLS_AS_PAIRS,
    "bare": TOOLS_BARE,
    "marked": TOOLS_MARKED,
    "channels": TOOLS_IN_CHANNELS,
    "text arguments": TOOLS_WITH_TEXT,
}
