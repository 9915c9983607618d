"""Keys, shell commands, files and exit codes, as the demo model explains them."""

from demo_recipe.dialogues.knowledge.topic import topic

USING = (
    topic(
        "Enter sends the message. For a new line press Alt-Enter or Ctrl-J, or end the line with a "
        "backslash; three double quotes open a long text.",
        "While the model answers, Enter queues the message.",
        "Alt-Enter makes a new line.",
        "enter|ctrl-j",
        names="""
            Enter
            the enter key
            Alt-Enter
            Ctrl-J
            (a new line|multi-line input|several lines)
        """,
        tasks="""
            (write|type|make|insert|start|enter|add) (a new line|a line break|several lines|
                more than one line|two lines|multiple lines|a newline|a paragraph)
            (send|submit) (a message|the message|my message)
            (write|type|paste) (a multi-line message|a poem|code)
            (break|wrap) a line
        """,
    ),
    topic(
        "Esc or Ctrl-C stops the answer and keeps what was written so far.",
        "/continue goes on with it. Stopping never leaves the program.",
        "Esc stops the answer.",
        "esc|ctrl-c",
        names="(Esc|the esc key|escape|the escape key|Ctrl-C|ctrl c|control c)",
        tasks="""
            (stop|interrupt|cancel|abort|halt|end|break off) (an answer|the answer|your answer|
                the model|generation|the generation|you|the reply|a long answer|the output)
            (make|get) (you|the model|it) to (stop|be quiet|stop talking|stop writing)
            stop (you|it|the model) (in the middle|while it writes|from writing|mid-sentence)
        """,
    ),
    topic(
        "Ctrl-D leaves when the line is empty; Ctrl-C twice within two seconds leaves too.",
        "/exit is the command for it.",
        "Ctrl-D leaves.",
        "ctrl-d|ctrl-c",
        names="(Ctrl-D|ctrl d|control d|the ctrl-d key)",
        questions="""
            (what|which) key (leaves|quits|exits|ends kvchat)
            how do I quit with the keyboard
        """,
    ),
    topic(
        "Up and Down go through your history, Ctrl-R searches it, Tab completes, Right accepts a "
        "suggestion.",
        "While the model answers, Up and Down edit the queue.",
        "Up shows your earlier messages.",
        "up|ctrl-r|tab",
        names="""
            (Ctrl-R|the up key|the tab key|Tab|the arrow keys|up and down|the history|input history|
                history search|completion)
        """,
        tasks="""
            (see|find|get|recall|reuse|repeat) (my last input|what I typed before|an earlier input|
                a line I typed|my input history)
            (search|browse|look through) (the history|my history|my inputs|what I typed)
            (complete|autocomplete) (a command|a path|a word)
        """,
    ),
    topic(
        "Alt-Left and Alt-Right show the previous and the next sibling answer.",
        "Siblings come from /retry; /tree shows all branches.",
        "Alt-Left and Alt-Right go through the answers.",
        "alt-",
        names="(Alt-Left|Alt-Right|alt left|alt right|Alt-Left and Alt-Right)",
        tasks="""
            (see|show|go to|flip to|browse) (the other|the next|the previous|
                the earlier) (answer|version|sibling answer)
            (compare|flip through|go through|move between) (answers|the answers|sibling answers|
                versions|my retries)
        """,
    ),
    topic(
        "Keys: Enter sends, Esc stops, Ctrl-C clears the line, Ctrl-D leaves, Up shows the "
        "history, Ctrl-G opens the editor, F2 shows statistics.",
        "Alt-Enter makes a new line, Alt-Left and Alt-Right go through sibling answers.",
        "Enter sends, Esc stops, Ctrl-D leaves.",
        "esc|enter",
        names="""
            (the|all) (keys|keyboard shortcuts|shortcuts|key bindings|hotkeys)
            (keys|keyboard shortcuts|shortcuts|key bindings|hotkeys)
        """,
        questions="""
            (what|which) (keys|shortcuts|key bindings|hotkeys) (are there|can I use|do you have|
                does kvchat have|exist)
            list (the|all) (keys|shortcuts|hotkeys)
            what does each key do
        """,
    ),
    topic(
        "Messages typed while the model answers are queued: you can see and edit them, and they "
        "are sent in turn.",
        "Up and Down edit the queue.",
        "Typing ahead fills a queue.",
        "queue",
        names="(the|a) [message] queue; (queued messages|queueing|typing ahead|the input queue)",
        tasks="""
            (type|write|ask|send) (while you answer|while the model answers|before you are done|
                during an answer|ahead)
            queue (a message|messages|a question)
            (see|edit|change) the queue
        """,
        questions="""
            (can|may) I (type|write|ask) while you (answer|write|talk|are answering)
            what happens if I type while you answer
        """,
    ),
    topic(
        "kvchat bench measures turns, resume, decode, prefill, spec, tiers, radix, memory, startup "
        "and cold starts.",
        "Every number comes with its peer or its ceiling, and the run ends with one JSON document.",
        "kvchat bench measures speed.",
        "bench",
        names="""
            kvchat bench
            the bench command
            (the benchmark|benchmarks|a benchmark|benchmarking)
        """,
        tasks="""
            (measure|test|benchmark|check) (the speed|performance|my machine|kvchat|
                how fast my machine is|the engine|the cache speed)
            run (a benchmark|benchmarks|the benchmarks)
            (compare|see) how fast (kvchat|my computer) is
        """,
    ),
    topic(
        "kvchat doctor checks terminal, Python, torch, GPU, disk and cache on one screen.",
        "It ends with exit code 0 only if all is well.",
        "kvchat doctor checks the installation.",
        "doctor",
        names="kvchat doctor; the doctor command; the doctor",
        tasks="""
            (check|test|verify|diagnose) (my installation|the installation|if everything works|
                my setup|whether all is well|the system|if kvchat is healthy)
            (find|solve|fix|diagnose) (a problem|problems|what is wrong|errors|
                an error) [with kvchat|with my setup]
            (see|know) if (my GPU is found|torch works|everything is fine|all is well)
        """,
        questions="""
            (kvchat|it|something) (does not|doesn't) work [right]
            (something|what) is (wrong|broken) with kvchat
            why does kvchat (fail|not start|crash)
        """,
    ),
    topic(
        "kvchat sessions lists saved conversations; show, export, import, rename and rm work on "
        "one.",
        "Inside a chat, /resume, /export, /import, /rename and /delete do the same.",
        "kvchat sessions manages saved chats.",
        "kvchat sessions",
        names="""
            kvchat sessions
            kvchat sessions (list|show|rm|export|import)
            the sessions command
            (sessions|saved sessions|session)
        """,
        tasks="""
            (list|see|show|view|manage) (all|my|the|all my|my saved|saved) (chats|conversations|
                sessions) [from the shell]
            (see|list) the ids of my chats
            (print|show|read) a (saved|old) (chat|conversation|session) in the shell
            (manage|organize|clean up) (my chats|sessions|conversations)
        """,
    ),
    topic(
        "Conversations live in your platform's data directory, one session file each, readable "
        "only by you. --sessions-dir puts them elsewhere.",
        "The KV cache lives in the cache directory and can be deleted at any time without losing a "
        "word.",
        "Chats are files in the data directory.",
        "data directory|session",
        names="""
            (session files|a session file|the session file|the sessions directory|
                the data directory)
            --sessions-dir
            the --sessions-dir (flag|option)
        """,
        tasks="""
            (find|see|open|back up) (the files of my chats|my session files|the saved files)
            (change|choose|set) where (chats|conversations|sessions) are (saved|stored|kept)
        """,
        questions="""
            where (are|do you keep|does kvchat keep|does kvchat store|do you store) (my chats|
                my conversations|the chats|conversations|sessions|the history|my messages)
            (where|in what file|in which folder) is (this chat|my chat|my data|everything|
                this conversation|the history) (saved|stored|kept)
            (in which|what|which) (folder|directory|file) (holds|has|are) (my chats|the chats|
                my conversations)
            where do my (words|messages|chats) go
        """,
        weight=1.3,
    ),
    topic(
        "kvchat models lists models, and kvchat models info MODEL shows its architecture, KV bytes "
        "per token and whether it is supported.",
        "kvchat models info demo shows the card of the demo model.",
        "kvchat models shows what can run.",
        "kvchat models",
        names="""
            kvchat models
            kvchat models (info|list|info demo)
            the models command
            the model card
        """,
        tasks="""
            (list|see|show|find) (the|all|my|available|installed) models
            (see|check|know|find out) (if|whether) a model is supported
            (see|get|read|show) (the model card|information about a model|details of a model|
                your card|the scores of the demo model)
        """,
    ),
    topic(
        "kvchat config show prints the settings, set changes one for good, path shows the file. "
        "--origin says where each value comes from.",
        "Flags win over KVCHAT_* variables, these over config.toml, and that over the defaults.",
        "kvchat config keeps settings.",
        "config",
        names="""
            kvchat config
            config.toml
            the config (command|file)
            (the configuration|configuration|the config|the settings file|environment variables|
                KVCHAT_ variables)
        """,
        tasks="""
            (change|set|keep|save|store) (a setting|settings|the default model|a default|defaults|
                my settings) (for good|permanently|forever|for all chats|in a file|in the config)
            (configure|set up) kvchat (permanently|in a file|with a config file)
            (find|open|edit|see) the (config file|configuration file|settings file|config)
            (set|use) environment variables
        """,
        questions="""
            where is the (config|configuration|settings) file
            (which|what) (wins|has priority), (flags or config|the flag or the environment)
            what is the (order|precedence) of settings
        """,
    ),
    topic(
        "Exit codes: 0 ok, 1 generation failed, 2 usage, 3 model, 4 context too long, 5 session "
        "not found, 6 store, 124 timeout.",
        "129, 130 and 143 mean a signal, 141 a closed pipe; the partial answer is saved first.",
        "0 is success, other codes name the error.",
        "exit code|ok|success",
        names="""
            (the exit codes|exit codes|an exit code|the exit code|return codes|exit code (3|2|4|124|
                130|1|5|6))
        """,
        questions="""
            (what|which) exit codes (are there|does kvchat have|exist)
            how do I know (if it failed|that an error happened) in a script
            what does it return on (error|failure|success)
        """,
    ),
    topic(
        "Model text, titles and file names are data: escape and control characters never reach "
        "your terminal.",
        "Pipes get the same unless you add --raw.",
        "kvchat cleans text before showing it.",
        "control characters|clean|escape",
        names="""
            (terminal safety|the safe terminal|sanitizing|escape codes|control characters|
                escape sequences)
            --raw
        """,
        questions="""
            (is|can) (model text|the output|the model) (safe|dangerous|harm my terminal|
                break my terminal)
            (can|could) (the model|an answer|a file) (attack|break|mess up|harm) my terminal
        """,
    ),
    topic(
        "What is saved is for you alone, directories 0700, files 0600, and not encrypted. "
        "--incognito writes nothing, /forget erases.",
        "Nothing leaves your machine, no chat text is in logs, and weights are read from "
        "safetensors only, without remote code.",
        "Your chats are private to you.",
        "0600|private|--incognito|0700",
        names="(privacy|security|data protection|my privacy|safety)",
        questions="""
            (how|is|are) (private|safe|secure|protected) (is kvchat|are my chats|is my data|
                my chats|my data)
            (can|could) (other users|others|someone else|other people) (read|see|open) my (chats|
                files|conversations|messages)
            (is|are) (my chats|my data|the files|session files|conversations) (private|safe|
                protected|encrypted|secure)
            does kvchat (protect|respect) my (privacy|data)
            does kvchat (run|load|execute) (remote|foreign|untrusted) code
        """,
    ),
    topic(
        "Before a costly /edit or /system kvchat shows its price, such as: /edit 3 re-reads 1,240 "
        "of 9,812 tokens, about 1.5 s.",
        "It is silent when the action is cheap and asks when it is costly.",
        "kvchat says what an action costs.",
        "price|re-reads|cost",
        names="""
            (the price|prices|prices before actions|the cost|a price) (of an action|shown first|
                of an edit|of commands)
        """,
        questions="""
            (what|how much) does (an edit|going back|/edit|a branch|/undo) cost
            why does kvchat (ask|show a price) before (an edit|/edit|it edits)
            what does re-reads 1,240 tokens mean
        """,
    ),
    topic(
        "make chat starts the demo, make demo-model rebuilds the demo pair, make test runs the "
        "tests.",
        "The demo model is trained from dialogues generated by kvchat itself, with a fixed seed.",
        "make chat starts the demo.",
        "make",
        names="make chat; make demo-model; the (makefile|make targets|recipe|demo recipe)",
        tasks="""
            (rebuild|retrain|train|build|reproduce) (the demo model|you|the demo pair|this model)
            (start|run) the demo
            (run|start) the tests
        """,
        questions="""
            how (was|is) the demo model (made|trained|built)
            can I (train|rebuild|retrain) (you|the demo model)
        """,
    ),
)
