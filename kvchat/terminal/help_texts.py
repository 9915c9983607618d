"""Two examples for every command, as /help COMMAND shows them: what to type, and what it does."""

Example = tuple[str, str]

EXAMPLES: dict[str, tuple[Example, Example]] = {
    "help": (("/help edit", "what /edit does"), ("/help all", "every command")),
    "exit": (("/exit", "leave"), ("/bye", "the same")),
    "new": (("/new", "begin afresh"), ("/new Holiday plans", "begin with a title")),
    "resume": (
        ("/resume", "choose from a list"),
        ("/resume holiday", "the conversation with that word in its title"),
    ),
    "rename": (("/rename Holiday plans", "a title"), ("/rename Rex, part 2", "another")),
    "delete": (
        ("/delete", "this conversation"),
        ("/delete holiday", "the one with that word in its title"),
    ),
    "export": (
        ("/export", "as Markdown, in this directory"),
        ("/export json notes/chat.json", "as JSON messages, to that file"),
    ),
    "import": (
        ("/import chat.json", "messages in JSON"),
        ("/import ~/old/20260101-120000-abcd.jsonl", "a session file"),
    ),
    "undo": (("/undo", "before your last message"), ("/undo 3", "before the last three")),
    "redo": (("/redo", "take the last /undo back"), ("/redo", "after /undo 3: all three again")),
    "rewind": (("/rewind", "choose a message"), ("/rewind 2", "back to message 2")),
    "edit": (
        ("/edit 2", "message 2, as /tree numbers it; alone: the last one"),
        ("/edit 2 Hello there", "send this in its place"),
    ),
    "retry": (("/retry", "one more answer"), ("/retry -n 3", "three, to choose from")),
    "compact": (
        ("/compact", "summarise all but the last two messages"),
        ("/compact the names and the dates", "and keep those above all"),
    ),
    "btw": (
        ("/btw What is a fjord?", "ask aside"),
        ("/btw Was that right?", "about the last answer"),
    ),
    "continue": (("/continue", "after a cut-off answer"), ("/continue", "as often as needed")),
    "fork": (("/fork", "a copy"), ("/fork Plan B", "a copy with a title")),
    "tree": (("/tree", "all branches"), ("/branches", "the same")),
    "switch": (("/switch 3", "the branch with message 3"), ("/switch 3.2", "its second answer")),
    "file": (
        ("/file notes.txt", "one file"),
        ("/file manual", "the files of /pin manual docs/*.md"),
    ),
    "system": (
        ("/system Answer in one sentence.", "set it"),
        ("/system @persona.txt", "set it from a file"),
    ),
    "set": (("/set temperature 0", "always the likeliest token"), ("/set", "all settings")),
    "show": (("/show chat", "the whole conversation"), ("/show settings", "the settings")),
    "think": (("/think off", "answer at once"), ("/think hide", "think, but do not show it")),
    "editor": (("/editor", "write in your editor"), ("/e", "the same")),
    "copy": (("/copy", "the last answer"), ("/copy code", "its last code block")),
    "model": (
        ("/model", "this model and those on this machine"),
        ("/model Qwen/Qwen3-0.6B", "go on with that one"),
    ),
    "stats": (("/stats", "all figures"), ("/stats off", "none after answers")),
    "spec": (("/spec off", "one token a step"), ("/spec auto", "draft where it pays")),
    "context": (("/context", "how full it is"), ("/tokens", "the same")),
    "tools": (
        ("/tools", "the tools, and which ask first"),
        ("/tools allow read_file", "run it without a question"),
    ),
    "cache": (("/cache", "what is kept"), ("/cache why", "why the last answer read so much")),
    "pin": (("/pin", "this conversation"), ("/pin manual docs/*.md", "files, under a name")),
    "unpin": (("/unpin manual", "that pin"), ("/unpin all", "every pin")),
    "forget": (("/forget last", "the last message and its answer"), ("/forget", "all of it")),
}
