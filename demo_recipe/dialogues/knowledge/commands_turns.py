"""Slash commands for conversations and turns, as the demo model explains them. Follows `/help`."""

from demo_recipe.dialogues.knowledge.topic import topic

COMMANDS_TURNS = (
    topic(
        "/help lists all slash commands with one line each.",
        "Tab completes a command while you type, and a mistyped one is answered with the closest "
        "name.",
        "/help lists the commands.",
        "/help",
        names="""
            /help
            /?
            the /help command
            the help command
            slash commands
            (the|a) slash command
            commands
        """,
        tasks="""
            (see|show|get|find|print|view|read) (all|the) [slash] commands
            (see|show|get|find) the list of [slash] commands
            get help
            (learn|find out) what commands there are
            (see|know) what I can type
            find a command
            (look up|remember) a command
        """,
        questions="""
            (what|which) [slash] commands (are there|do you have|can I use|exist|does kvchat have|
                do I have)
            (what|which) commands do you (know|understand|support)
            (list|show|give me|print) (the|all|all the) [slash] commands
            (where|how) do I find the commands
            is there a (list|menu|help|manual|help page)
            what can I type here
            (all|the) [slash] commands
            how many commands are there
        """,
        weight=2.5,
    ),
    topic(
        "/exit leaves kvchat; /quit and /bye do the same, and so does Ctrl-D on an empty line.",
        "The chat is saved anyway: kvchat -c continues it.",
        "/exit leaves.",
        "/exit|/quit|/bye|ctrl-d",
        names="/exit; /quit; /bye; the /(exit|quit|bye) command; the exit command",
        tasks="""
            (leave|quit|exit|close|stop|end) kvchat
            (leave|quit|exit|close|stop|end) (the program|this program|the app|this|the session)
            (get|go) out [of here|of this|of kvchat]
            (end|close|leave) (the chat|this chat|the conversation)
            (log|sign) out
            (quit|exit|terminate)
            shut (it|kvchat|this) down
            turn (kvchat|this|it) off
        """,
        weight=1.5,
    ),
    topic(
        "/new starts a fresh conversation; /clear is another name for it. The old one stays saved.",
        "/resume brings the old conversation back.",
        "/new starts a fresh chat.",
        "/new|/clear",
        names="/new; /clear; /reset; the /(new|clear|reset) command; a new (chat|conversation)",
        tasks="""
            (start|begin|open|make|create) a (new|fresh|clean|different|second) (chat|conversation|
                session|one)
            start (over|again|afresh|from scratch|anew)
            (clear|empty|reset) (the chat|this chat|the conversation|the context|everything)
            (begin|start) with an empty (chat|context|page)
            (change|switch to) a new (subject|topic)
            wipe the (chat|context)
        """,
        weight=1.5,
    ),
    topic(
        "/resume opens a saved conversation; /load is another name. From the shell, kvchat -c "
        "continues the last one and -r ID a particular one.",
        "Without an id a picker lists the saved conversations. What was read then is still in the "
        "cache.",
        "/resume opens a saved chat.",
        "/resume|-c",
        names="""
            /resume
            /load
            /chats
            /list
            /session
            the /(resume|load|chats) command
            the (resume|session) picker
        """,
        tasks="""
            (continue|resume|reopen|load|restore|open|find|go back to) (an old|a saved|an earlier|
                a previous|my old|my last|an older) (chat|conversation|session)
            (continue|resume|go on with) (this|the chat|this chat|my chat) (later|tomorrow|
                another day|next week|next time)
            (come|get|go) back to (this|this chat|an old chat|yesterday's chat|my chat|
                an earlier chat) [later|tomorrow]
            (pick up|continue|go on) where I (left off|stopped)
            (see|find|open) (my old chats|my history|past conversations)
            (continue|resume) yesterday's (chat|conversation)
        """,
        questions="""
            (is|will) this chat [be] (there|still there|available) (later|next week|
                when I come back|the next time)
            (can|may) I come back (later|to this)
            how do I get my (old chat|last conversation|history) back
            where are my old chats
            (does|will) (kvchat|it) remember (this chat|my chats|the conversation) (later|next time|
                tomorrow)
        """,
        weight=2,
    ),
    topic(
        "/rename gives the conversation another title.",
        "From the shell, kvchat sessions rename does it, and --title sets one at the start.",
        "/rename changes the title.",
        "/rename",
        names="/rename; the /rename command; the rename command",
        tasks="""
            (rename|name|title|label) (the chat|this chat|a chat|the conversation|this conversation|
                a session)
            (change|set|give|edit) (the title|a title|the name|another title|
                a new title) [of this chat|to this chat|of the conversation]
            give (this|the chat|this conversation) a (name|title|better name|new title)
            call this chat something else
        """,
    ),
    topic(
        "/delete removes the saved conversation.",
        "kvchat sessions rm does it from the shell. /forget also drops the blocks that no other "
        "chat shares.",
        "/delete removes a chat.",
        "/delete",
        names="/delete; the /delete command; the delete command",
        tasks="""
            (delete|remove|erase|destroy|throw away) (the chat|this chat|a chat|the conversation|
                this conversation|an old chat|a session|a saved chat)
            get rid of (a chat|this chat|an old chat|a conversation|this conversation)
            (delete|remove) (old|saved|past) (chats|conversations|sessions)
            (remove|delete) (a|this) session
        """,
    ),
    topic(
        "/export writes the conversation to a file; /save is another name.",
        "kvchat sessions export does it from the shell, and /import reads .json and .jsonl back.",
        "/export writes the chat to a file.",
        "/export|/save",
        names="/export; /save; the /(export|save) command; the export command; exporting",
        tasks="""
            (export|save|store|write|download|dump) (the chat|this chat|the conversation|
                this conversation|our chat|my chat) [to a file|as a file|to disk|as text]
            (get|make) a file of (the chat|this chat|the conversation)
            (share|send|give) (this chat|the conversation) (with|to) (a friend|someone|others)
            put (this|the chat|the conversation) into a file
            back up (this|a) (chat|conversation)
        """,
    ),
    topic(
        "/import reads a conversation from a file.",
        "kvchat sessions import does it from the shell. The files in sessions/ are worth a try.",
        "/import loads a chat from a file.",
        "/import",
        names="/import; the /import command; the import command; importing",
        tasks="""
            import (a chat|a conversation|a session|chats|an exported chat|a file with a chat)
            (load|read|open|get) (a chat|a conversation|an exported chat|a session) from (a file|
                disk|another computer)
            (bring|move|copy) (a chat|a conversation) (here|from another computer|from elsewhere)
            (use|open) an exported (file|chat|conversation)
            try the sample (chats|sessions|conversations)
        """,
    ),
    topic(
        "/undo takes back the last turn. It only moves back in the tree, so /redo brings the turn "
        "back.",
        "Nothing is read again: the blocks before it are still cached.",
        "/undo takes back the last turn.",
        "/undo",
        names="/undo; /pop; the /(undo|pop) command; the undo command; undo; undoing",
        tasks="""
            undo [that|this|it|something|my message|my last message|the last turn|the last step|
                a message|a turn]
            take back (what I said|what I wrote|my message|the last turn|that|my question|
                my last question|my words|a message)
            (remove|delete|cancel|revert|retract|unsend) (my last message|the last message|
                the last turn|my message|my last question|the last answer)
            go back (one step|a step|one turn|one message|a turn)
            (unsay|revoke) (that|what I said|it)
            (drop|forget) the last (turn|message|question)
        """,
        questions="""
            I (sent|wrote|typed|said) (the wrong thing|something wrong|this by mistake|
                a wrong message|something stupid)
            (what if|suppose) I (sent|typed|wrote) something (wrong|by mistake|by accident)
            (oops|ups), (undo that|I sent that too early|that was wrong, undo it)
            I (did not|didn't) (want|mean) to send that
            I (sent|pressed enter) too early
        """,
        weight=2,
    ),
    topic(
        "/redo brings back the turn that /undo took away.",
        "Both move the tip of the conversation tree and cost no prefill.",
        "/redo undoes an undo.",
        "/redo",
        names="/redo; the /redo command; the redo command; redo",
        tasks="""
            redo [that|it|something|a turn|my message]
            undo (an undo|the undo|my undo|an /undo)
            (bring|get) (it|the turn|the message|that|the last turn|what I undid) back [after undo|
                after an undo]
            (restore|recover) (the turn|what I undid|an undone turn|the undone message)
            take back (an undo|the undo)
            go forward (again|one step|one turn)
        """,
    ),
    topic(
        "/rewind goes back to an earlier turn that you choose; nothing is deleted.",
        "Pressing Esc twice on an empty line does the same.",
        "/rewind goes back to a turn you choose.",
        "/rewind",
        names="/rewind; the /rewind command; the rewind command; rewinding",
        tasks="""
            rewind [the chat|the conversation|to an earlier turn|a few turns]
            (go|jump|get) back (several|some|a few|five|three|many) (turns|steps|messages)
            (go|jump|return|get back) to (an earlier|a previous|an older|a certain|the first) (turn|
                message|point|question)
            go back (far|further|to the beginning|to the start|to the middle)
            return to (where we were|the point before)
            (choose|pick) an earlier (turn|point) [to continue from]
        """,
    ),
    topic(
        "/edit n changes your nth message, or the last one, and answers it anew on a new branch.",
        "If much must be read again, the price is shown first. The old branch stays in /tree.",
        "/edit changes an earlier message.",
        "/edit",
        names="/edit; /edit 3; /edit n; the /edit command; the edit command; editing",
        tasks="""
            (edit|change|correct|fix|rewrite|rephrase|alter|modify) (a message|my message|
                my last message|an earlier message|a previous message|my question|an old question|
                what I wrote|a typo in my message)
            (change|correct|edit) something I (said|wrote|asked|typed) [earlier|before]
            (fix|correct) a (typo|mistake) in (a message|my question|what I sent|an earlier message)
            (edit|change) (message|turn) (three|3|2|five)
            ask (the same|it|my question) (in other words|differently)
        """,
        weight=1.3,
    ),
    topic(
        "/retry answers the last message again; /regen is another name. /retry -n 4 makes four "
        "answers at once.",
        "All answers stay as branches: Alt-Left and Alt-Right go through them.",
        "/retry gives another answer.",
        "/retry|/regen",
        names="""
            /retry
            /regen
            /regenerate
            /retry -n 4
            the /(retry|regen) command
            the retry command
            regenerating
        """,
        tasks="""
            (retry|regenerate|repeat) [the answer|the last answer|an answer|your answer|
                the question]
            (get|have|see|hear|ask for|generate|make) (another|a new|a second|one more|a better|
                an alternative) (answer|reply|response|version)
            (try|answer|ask) (again|once more|that again|it again)
            (get|have|see|make|compare) (several|four|more|three|many|multiple) (answers|replies|
                versions) [at once|to one question]
            (redo|improve|replace) (the answer|your answer|the last answer|the reply)
            (have|let) (you|the model) answer (again|once more|anew)
        """,
        questions="""
            I (don't|do not) like (the answer|this answer|that answer|your answer|the reply)
            (the answer|that|your reply) was (not good|bad), (again|once more|another one)
            (give me|show me) (another|a new|a different|one more) (answer|version|reply)
            can you (answer|say) (that|it) again differently
            is there another answer
        """,
        weight=1.5,
    ),
    topic(
        "/continue lets the model go on with an answer that was cut short.",
        "An answer is cut by --max-tokens, by Esc or by Ctrl-C; the partial answer is kept.",
        "/continue goes on with a cut answer.",
        "/continue",
        names="/continue; the /continue command; the continue command",
        tasks="""
            (continue|finish|complete|extend) (an answer|the answer|a cut answer|a stopped answer|
                the reply|an interrupted answer|an unfinished answer)
            (go|carry) on with (the answer|a stopped answer|an unfinished answer|a cut answer|
                the reply)
            (let|make) (the model|it|you) (go on|finish|continue|write more|complete the answer)
            get the rest of (the|an|a cut) answer
            (resume|finish) an answer I (stopped|interrupted)
        """,
        questions="""
            (the|your|my) answer (was cut|stopped|is not complete|is incomplete|ended too early|
                is cut off)
            why did the answer (stop|end) (in the middle|too early)
            where is the rest of the answer
        """,
    ),
    topic(
        "/fork goes on in a copy of this conversation; /branch is another name. --fork does it "
        "when you resume one.",
        "The copy shares all blocks up to this point, so it costs nothing. /resume goes back to "
        "the original.",
        "/fork goes on in a copy.",
        "/fork|/branch",
        names="""
            /fork
            /branch
            the /(fork|branch) command
            the fork command
            (a|the) fork
            forking
            --fork
        """,
        tasks="""
            fork (the chat|this chat|the conversation|this conversation|here|a chat)
            (branch|split|copy|duplicate|clone) (the chat|this chat|the conversation|
                this conversation|off|a chat)
            (start|make|create|open) a (branch|fork|side branch|new branch|copy of the chat)
            (try|explore) (something else|another direction|another idea) without losing (this|
                the chat|anything)
            (keep|leave) this chat as it is and (try|go on with) (something else|another way)
            (continue|go on) in two (ways|directions)
        """,
        weight=1.3,
    ),
    topic(
        "/tree shows all branches of the conversation and marks where you are.",
        "/retry and /edit make branches. /switch goes to another branch.",
        "/tree shows the branches.",
        "/tree",
        names="/tree; /branches; the /(tree|branches) command; the tree; the tree of branches",
        tasks="""
            (see|show|view|list|print|display|find|look at) (the|all|all my|my|the other) branches
            (see|show|view|print|draw|display) the [conversation|chat] tree
            (see|show|view|get) (an overview|a map|the structure) of (the chat|this conversation|
                my branches|the conversation)
            (see|find) where I am in the (tree|conversation)
        """,
        questions="""
            (what|which) branches (are there|do I have|exist|does this chat have)
            how many branches (are there|do I have|does this chat have)
            where are my (branches|other answers|forks)
        """,
        weight=1.3,
    ),
    topic(
        "/switch goes to another branch of the conversation.",
        "Alt-Left and Alt-Right go to the neighbouring answers, and /tree shows all branches.",
        "/switch changes the branch.",
        "/switch",
        names="/switch; the /switch command; the switch command",
        tasks="""
            (switch|go|change|move|jump|get) to (another|a different|the other|an older|the first|
                my other) branch
            (change|switch) (the branch|branches|between branches)
            (move|go|jump) between branches
            (open|use|continue) (another|the other|a different) branch
            (leave|get off) this branch
        """,
    ),
    topic(
        "/compact lets a summary take the place of the older messages; /compress is another name.",
        "The full conversation stays on its own branch, and /undo goes back to it.",
        "/compact sums up the older messages.",
        "/compact",
        names="/compact; /compress; the /(compact|compress) command; the compact command",
        tasks="""
            (compact|compress|shorten|condense) [the chat|the conversation|this chat|the context|
                my chat|the history]
            (make|get) (room|space|more room) (in the context|in the chat|for more messages|
                when the context is full)
            (sum up|summarize|summarise) (the chat|the conversation|this chat|the older messages|
                the history|what we said)
            (replace|swap) the older messages (with|by) a summary
            (go on|continue) when the context is (full|nearly full|almost full)
            (reduce|shrink|cut down) (the context|the tokens|the history|this chat)
        """,
        questions="""
            the context is (full|nearly full|almost full), what (now|can I do|do I do)
            what (can I do|do I do|helps) when the context is (full|nearly full)
            is there a /(compact|compress) command
            (can|could) you (summarize|compact|compress|shorten) (our chat|this conversation|
                the history)
        """,
        weight=2.2,
    ),
    topic(
        "/btw asks something aside: neither the question nor the answer joins the conversation.",
        "The conversation goes on as if you had not asked. /btw QUESTION is all you type.",
        "/btw asks aside.",
        "/btw",
        names="/btw; the /btw command; the btw command; a question on the side; asking aside",
        tasks="""
            ask [you] (something|a question|anything) (aside|on the side|in between|by the way|
                beside the conversation|without keeping it|off the record)
            (ask|say) something (that is not kept|that does not stay|that is forgotten|
                without changing the chat|without disturbing the conversation)
            (put|ask) a (side question|quick question|question in passing)
            keep a question out of (the chat|the conversation|the history)
        """,
        questions="""
            is there a /btw command
            (does|will) a side question (stay|remain|count) in the chat
        """,
        weight=2.2,
    ),
    topic(
        "kvchat has no such command: /help lists all it has.",
        "A mistyped command is answered with the closest name and never sent to the model.",
        "There is no such command.",
        "no such|/help lists",
        names="""
            /(summarize|search|translate|weather|image|play|theme|login|memory|
                agents|web|run|python|vote|sing|join|mute|plugin|remind|mail|paste|voice|draw)
            the /(summarize|search|translate|weather|image|theme|login|memory|web|
                run|voice|plugin) command
        """,
        questions="""
            is there a /(login|search|translate|weather|image|theme|web|voice) command
            does /(login|search|translate|weather|image|theme|web|voice) (exist|work)
            (why|how come) (is there no|there is no) /(login|search|theme|web) [command]
            what (does|would) /(login|search|weather|image|web|run|voice) do
        """,
        weight=0.6,
    ),
)
