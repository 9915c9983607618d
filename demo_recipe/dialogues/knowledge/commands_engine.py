"""Slash commands for the engine, as the demo model explains them. Follows `/help`."""

from demo_recipe.dialogues.knowledge.topic import topic

COMMANDS_ENGINE = (
    topic(
        "/spec on, off, auto, ngram or draft sets how tokens are guessed ahead. --spec and "
        "--no-spec do it from the shell.",
        "auto stops guessing where it does not pay. The answers stay the same either way.",
        "/spec switches speculation.",
        "/spec|--spec|--no-spec",
        names="""
            /spec
            the /spec command
            the spec command
            --spec
            --no-spec
            /spec (auto|on|draft)
        """,
        tasks="""
            (turn|switch) on (speculation|speculative decoding|drafting|the draft|guessing)
            (turn|switch) (speculation|the draft|drafting|speculative decoding|guessing) on
            (enable|activate|start|control|configure) (speculation|speculative decoding|
                the draft|drafting)
            (run|chat|answer|decode) with (speculation|a draft|speculative decoding)
            (make|let) kvchat (speculate|guess tokens|draft)
            (choose|change|set) the (draft|speculation) mode
        """,
        weight=1.3,
    ),
    topic(
        "/spec off turns speculation off; --no-spec starts without it.",
        "/spec on turns it on again, and /spec auto lets kvchat decide.",
        "/spec off stops speculation.",
        "/spec off|--no-spec",
        names="/spec off; the --no-spec (flag|option)",
        tasks="""
            (turn|switch) off (speculative decoding|the draft model|drafting|the drafts)
            (turn|switch) (speculation|the draft|drafting|speculative decoding|guessing) off
            (disable|deactivate) (speculation|speculative decoding|the draft|drafting|
                the draft model)
            (stop|end|avoid|prevent) (speculating|guessing|drafting|the speculation)
            (get rid of|do without|remove|drop) (speculation|the draft|drafting|the draft model)
            (chat|run|work|go on) without (a draft|drafts|speculation|guessing)
        """,
        questions="""
            (I don't|I do not) (want|like|need) (speculation|the draft|a draft model|drafting)
            no (speculation|drafting|draft model) please
            (speculation|the draft) is not (useful|helpful) here, (off|stop it)
        """,
    ),
    topic(
        "/stats on or off switches the statistics line under each answer; F2 does the same.",
        "It shows cached tokens, tokens read, time to first token, speed, drafts accepted and "
        "context used.",
        "/stats on shows the statistics line.",
        "/stats|f2",
        names="""
            /stats
            /status
            the /stats command
            the stats command
            F2
            the F2 key
            --stats
            (the|your) statistics
        """,
        tasks="""
            (see|show|get|view|turn on|enable|display|print) (statistics|stats|the statistics|
                the stats|numbers|the speed|tokens per second|how fast it is|the timing)
            (hide|turn off|disable|remove) (statistics|stats|the statistics|the stats|
                the line below the answer|the numbers)
            (measure|check|see|know) how fast (you are|it is|the model is|an answer was)
            (see|count) the tokens of an answer
        """,
    ),
    topic(
        "/context shows how much of the context is used; /tokens is another name.",
        "When it gets full, /new starts a fresh chat.",
        "/context shows the context used.",
        "/context|/tokens",
        names="/context; /tokens; /info; the /(context|tokens|info) command; the context command",
        tasks="""
            (see|show|check|know|find out|view) how (full|big|long|large) (the context|this chat|
                the chat|my chat) is
            (see|show|check|count|know|get) (the context|the tokens|how many tokens I used|
                the number of tokens|the token count|the context usage|how many tokens are left)
            (see|check|know) how much (context|room|space) is (left|used|free)
            count (tokens|the tokens of this chat)
        """,
        questions="""
            how many tokens (did I use|are used|are left|does this chat have|have I used|
                is this chat)
            how (full|big|long) is (the context|this chat|the chat) [now]
            is the context (full|nearly full|almost full)
        """,
    ),
    topic(
        "/cache shows what is kept on disk: /cache tree, verify, gc, clear and why. From the shell "
        "it is kvchat cache, for all but why.",
        "/cache why shows the first token that differs when something expected to be cached was "
        "not.",
        "/cache looks into the cache.",
        "/cache|kvchat cache",
        names="""
            /cache
            the /cache command
            the cache command
            /cache tree
            kvchat cache
            kvchat cache (status|tree)
        """,
        tasks="""
            (see|show|view|check|inspect|look at|look into|list) (the cache|the KV cache|
                what is cached|my cache|the cache status|the state of the cache)
            (see|know|check|find out) how (big|large|full) the cache is
            (see|know|check) (what|how much) is (in the cache|cached|stored)
            (manage|control) the cache
        """,
    ),
    topic(
        "/cache why says why something was not cached and shows the first token that differs.",
        "Usual reasons: the system prompt changed, the model changed, or the blocks were evicted.",
        "/cache why explains a miss.",
        "/cache why",
        names="/cache why; the /cache why command; the why command",
        tasks="""
            (find out|see|know|understand|learn|check) why (it|the chat|my chat|something|this|
                a prompt|the answer) (was not|is not|wasn't|isn't) cached
            (find out|see|know) why (the cache missed|there was a miss|there was no hit|
                everything was read again)
            (debug|investigate) a [cache] miss
            (find|see) the first token that (differs|changed)
        """,
    ),
    topic(
        "/cache verify reads all that is kept and checks it against its checksums.",
        "What is damaged is dropped and computed again when it is needed.",
        "/cache verify checks the blocks.",
        "/cache verify|kvchat cache verify",
        names="/cache verify; kvchat cache verify; the (verify|cache verify) command",
        tasks="""
            (verify|test|validate) (the cache|the blocks|my cache|the disk cache|all blocks)
            (check|see|make sure|verify) (that|if|whether) the cache is (healthy|fine|intact|ok|
                correct|not broken|not corrupt)
            (find|detect) (broken|corrupt|damaged|bad) blocks
        """,
    ),
    topic(
        "/cache gc removes what is out of date or beyond the limit, and kvchat cache clear "
        "empties the cache on disk.",
        "No word of any chat is lost: the cache can be deleted at any time.",
        "/cache gc frees old blocks.",
        "gc|clear",
        names="""
            /cache gc
            /cache clear
            kvchat cache (gc|clear)
            the (gc|cache gc|cache clear) command
            garbage collection
        """,
        tasks="""
            (clear|empty|delete|wipe|clean|purge|flush|reset) (the cache|the KV cache|
                the disk cache|my cache|the cached blocks|cached data)
            (free|save|get back|reclaim) (disk space|space on the disk|space|some disk)
            (remove|delete|drop) (old|unused|cached) (blocks|cache entries|cache files)
            clean up (the cache|old blocks|the disk)
        """,
    ),
    topic(
        "/forget removes the text of the conversation and the blocks that no other chat shares.",
        "/undo only takes back a turn; --incognito never writes anything.",
        "/forget erases text and blocks.",
        "/forget",
        names="/forget; the /forget command; the forget command",
        tasks="""
            (forget|erase|remove|wipe|delete) (everything|all traces|what I said|
                this chat completely|all of this|this chat for good|every trace of this chat)
            (make|let) (you|kvchat|it|the program) forget (this|everything|what I said|this chat|me|
                it all)
            (remove|erase|delete) (my secrets|a secret|private text|a password I typed|my data)
            leave no trace of this chat
        """,
        questions="""
            forget (everything|what I said|all of this|me|all|that|it)
            (please|now|ok|can you) forget (everything|what I told you|my name|it all|all that)
            I told you a secret, (forget it|erase it|how do I remove it)
        """,
    ),
)
