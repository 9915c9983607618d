"""Slash commands for input and settings, as the demo model explains them. Follows `/help`."""

from demo_recipe.dialogues.knowledge.topic import topic

COMMANDS_INPUT = (
    topic(
        "/file PATH adds a file to your message; /read and @path do the same, and -f PATH does it "
        "from the shell.",
        "The text of the file goes to the model in front of your message.",
        "/file adds a file.",
        "/file|/read|@|-f",
        names="""
            /file
            /read
            /add
            @path
            the /(file|read) command
            (an attachment|attachments|attaching a file)
            the -f flag
            --file
            -f
        """,
        tasks="""
            (attach|add|send|upload|include|insert|load|read|open|use|give you|show you) (a file|
                files|a document|my file|a text|a text file|my notes|source code|a log file|
                two files)
            (attach|add|send) (a file|a document) to (my message|the chat|the prompt|my question)
            (ask about|talk about|chat about|discuss) (a file|a document|my notes|
                the content of a file)
            put (a file|a document) into (the chat|my message|the prompt)
            pass a file (to the model|on the command line|to kvchat)
            let (you|the model) read (a file|a document|my notes)
        """,
        weight=1.5,
    ),
    topic(
        "/pin NAME FILES keeps documents warm in the cache, as in /pin manual docs/*.md. Any later "
        "chat can start from them at once.",
        "Pinned contexts stay on disk while there is room. /unpin lets one go.",
        "/pin keeps documents ready.",
        "/pin",
        names="/pin; the /pin command; the pin command; /pin manual docs/*.md",
        tasks="""
            pin (a document|documents|a file|files|a manual|a context|my notes)
            keep (a document|a manual|files|a file|my notes) (warm|ready|in the cache|cached|
                in memory)
            (reuse|share|use) (a document|a manual|the same file) in (every chat|many chats|
                several chats|all chats|later chats)
            (start|begin) (a chat|chats|every chat) with (a document|the same document|a manual)
            (have|make) (a manual|a document) (ready|read) before I ask
            read a (long document|manual|book) only once
        """,
    ),
    topic(
        "/unpin lets a pinned context go, so that its blocks may leave the cache.",
        "/pin keeps a context, /unpin ends that.",
        "/unpin lets a pinned context go.",
        "/unpin",
        names="/unpin; the /unpin command; the unpin command; unpinning",
        tasks="""
            unpin (a document|a file|it|a context|something|the manual|my notes)
            (remove|delete|drop|end|undo) a (pin|pinned context|pinned document|pinned file)
            (stop|no longer) (pin|keep warm) a document
            (let|make) a pinned (document|context|file) go
            (free|release) a pinned (document|context)
            get rid of a pinned (document|context|file)
        """,
    ),
    topic(
        "/system shows or sets the system prompt. From the shell, -s TEXT sets it.",
        "A changed system prompt means that the whole chat is read again.",
        "/system sets the system prompt.",
        "/system|-s",
        names="""
            /system
            the /system command
            (the|a) system (prompt|message)
            system prompts
            the -s flag
            --system
            -s
        """,
        tasks="""
            (set|change|edit|see|show|write|use|add|give|view) (the|a|my own|another|
                a new) system (prompt|message|text)
            (tell|make) (you|the model) (how to behave|to be brief|to act like a pirate|
                to answer in rhymes|to be polite)
            (give|set) (you|the model) (a role|a persona|general instructions|rules|a character)
            (change|set) (your|the model's) (role|behaviour|behavior|personality|instructions)
        """,
        weight=1.2,
    ),
    topic(
        "/set changes a setting in the chat, such as the temperature; /show shows the settings.",
        "kvchat config set keeps a setting for good.",
        "/set changes a setting.",
        "/set",
        names="/set; the /set command; the set command; (settings|options|parameters|preferences)",
        tasks="""
            (change|set|adjust|modify|edit) (a setting|settings|the settings|an option|options|
                parameters|a parameter|the temperature here|preferences)
            (change|set) (something|the temperature|top-p|the sampling) (in the chat|
                during the chat|while chatting|here)
            (configure|customize|customise) (the chat|kvchat|this|things) [here]
            make a setting (in the chat|here|now)
        """,
    ),
    topic(
        "/show shows the current settings.",
        "/set changes them, and kvchat config show --origin says where each value comes from.",
        "/show shows the settings.",
        "/show",
        names="/show; the /show command; the show command",
        tasks="""
            (see|show|view|list|print|check|look at|know) (the|my|all|all the|the current|
                current) (settings|options|parameters)
            (see|check|find out|know) (which|what) (settings|temperature|options) (I use|are set|
                are active|is set)
            (see|check) how (kvchat|the chat|the model) is (set up|configured)
            (display|print) the configuration (here|of this chat)
        """,
    ),
    topic(
        "/model shows or changes the model inside the chat. To start with a real one: kvchat "
        "--model <hub id or directory>.",
        "Another model has its own cache, so the chat is read anew by it.",
        "/model changes the model.",
        "/model|--model",
        names="/model; /models; the /model command; the model command",
        tasks="""
            (change|switch|swap|replace) (the model|models|your model|model) [here|
                in the chat|now|without leaving|during a chat]
            (see|check|know|find out) (which|what) model (is running|is loaded|I use|is used)
            (use|try|load|pick|choose) (another|a different|a second) model (in this chat|here|
                without restarting|for this chat)
            (go on|continue) with another model
        """,
    ),
    topic(
        "Start kvchat with a real model: kvchat --model <hub id or directory>. -m is the short "
        "form.",
        "A hub id is a name as on the Hugging Face hub; a directory holds config.json, "
        "tokenizer.json and safetensors weights.",
        "kvchat --model <hub id or directory> loads a real model.",
        "--model",
        names="""
            --model
            the (--model|-m|model) (flag|option)
            -m
            (a|the) (hub id|model directory)
            real models
            a real model
            other models
        """,
        tasks="""
            (load|use|run|start|get|try|open|install|add|choose|pick|have|download|set up) (a|
                another|a real|a better|a bigger|a larger|a smarter|my own|a different|a proper|
                a good|a stronger|a local|a new) (model|llm|language model)
            (load|use|run|start|try|get|chat with|talk to|download) (qwen|mistral|gemma|phi|
                deepseek|a llama model|smollm|granite|an 8B model|a hugging face model|
                a model from the hub|gpt-oss|a 7B model)
            (switch|change|upgrade|move) to (a real|a bigger|a better|another|a smarter|a larger|
                my own) (model|one)
            (load|use|run|open) a model from (a directory|a folder|disk|the hub|hugging face|
                my disk)
            (get|have) (better|real|good|smarter|serious|useful) (answers|replies)
            (replace|leave|get rid of) (you|the demo model|this model|the tiny model)
            (use|run|talk to) (something|someone) (smarter|bigger|better)
            make you (smarter|better|bigger|more intelligent)
        """,
        questions="""
            (which|what) models (are supported|can I use|work|does kvchat support|can I run|
                do you support|are there)
            (can|does) (kvchat|it|this) (run|load|support|use) (qwen|mistral|gemma|other models|
                bigger models|real models|any model|deepseek|phi|hugging face models|large models)
            where do I (get|find|download) (models|a model|real models|a better model)
            is there a (better|bigger|smarter|larger|real) (model|version) [of you|than you]
            how do I get a real answer
            what model should I (use|load|try)
            I want (something|a model) (better|smarter|bigger|real) [than you]
        """,
        weight=5,
    ),
    topic(
        "/think on lets the model think before it answers, where its template has a switch; /think "
        "off stops that.",
        "/think show and /think hide choose whether you see the thinking. The demo does not think.",
        "/think switches thinking.",
        "/think|--think",
        names="""
            /think
            --think
            the /think command
            the think command
            /think (on|off|show|hide)
            thinking mode
        """,
        tasks="""
            (turn|switch) (on|off) (thinking|the thinking|reasoning|the reasoning|thinking mode)
            (turn|switch) (thinking|reasoning|thinking mode) (on|off)
            (enable|disable|activate|control) (thinking|reasoning|thinking mode)
            (let|make) (the model|you|it) (think|reason) [first|before it answers|longer|more]
            (stop|keep) (the model|it) from (thinking|reasoning)
            (show|hide|see) (the thinking|the reasoning|what the model thinks|the thoughts)
        """,
        questions="""
            is there a /think command
            (can|could) (you|the model) think (first|before answering|longer)
        """,
        weight=2.2,
    ),
    topic(
        "kvchat --tools lets the model read files here and run commands; it asks you first. /tools "
        "lists them.",
        "The demo model cannot call tools: its template has no place for them. MCP servers are "
        "named in mcp.json.",
        "--tools lets a model use tools.",
        "--tools|/tools",
        names="""
            /tools
            --tools
            --allow-tool
            the /tools command
            the tools command
            the --tools (flag|option)
            (tools|tool calls|tool use|function calling|mcp|mcp servers|an mcp server)
        """,
        tasks="""
            (let|make) (you|the model|it) (use tools|call tools|run commands|read my files|
                search my files|call functions)
            (use|enable|turn on|allow|add|give you) (tools|tool calls|mcp servers|function calling)
            (see|list|show) (the tools|which tools there are|what the model may call)
            (connect|add|configure) (an mcp server|mcp servers|my tools)
            allow a tool [without a question|for ever|once]
        """,
        questions="""
            (can|could) you (use tools|call tools|run commands|run a command|call functions)
            (which|what) tools (are there|do you have|can you use)
        """,
        weight=2.2,
    ),
    topic(
        "/editor opens your $EDITOR for a long message; Ctrl-G does the same.",
        "What you save there stands at the prompt, and Enter sends it.",
        "/editor opens your editor.",
        "/editor|ctrl-g",
        names="/editor; /e; the /editor command; the editor command; Ctrl-G; ctrl g; the editor",
        tasks="""
            (write|type|edit|compose) (a long message|a long text|a long prompt) [in my editor|
                in vim|in an editor|in nano|in emacs]
            (open|use|start|call) (my editor|an editor|the editor|vim|nano|emacs|my own editor|
                an external editor)
            (write|edit|type) in (my editor|vim|emacs|nano|an editor)
            (compose|prepare) a (long|big) (message|prompt)
        """,
    ),
    topic(
        "/copy copies the last answer to the clipboard.",
        "From the shell you can pipe an answer instead: stdout carries the answer and nothing "
        "else.",
        "/copy copies the answer.",
        "/copy",
        names="/copy; the /copy command; the copy command; the clipboard",
        tasks="""
            copy (the answer|your answer|the last answer|an answer|the reply|the text|
                what you said|a reply) [to the clipboard]
            (put|get) (the answer|the last answer|the reply|the text) (on|onto|into|
                in) (the|my) clipboard
            (paste|use) (the answer|your answer|the reply) (elsewhere|in another program|
                somewhere else)
            copy to the clipboard
            copy and paste (an answer|the reply)
        """,
    ),
)
