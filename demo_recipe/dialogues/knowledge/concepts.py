"""Branches, speculation, tokens, speed and safety, as the demo model explains them."""

from demo_recipe.dialogues.knowledge.topic import topic

CONCEPTS = (
    topic(
        "A conversation is a tree: /retry and /edit start new branches, and all branches share the "
        "blocks they have in common.",
        "/tree shows the branches, /switch goes to another one. Going back and forth costs no "
        "prefill.",
        "Branches are other ways the same chat could go on.",
        "branch|tree & share|common|same",
        names="""
            (a|the) branch
            branches
            branching
            (the|a) conversation tree
            (chat|conversation) branches
            sibling answers
        """,
        questions="""
            (how|why) is a (chat|conversation) a tree
            (can|does) (a chat|a conversation|kvchat) have (branches|several answers|
                more than one answer)
            what is (kept|shared|lost) when I (go back|branch|fork|undo)
            does (branching|a branch|going back) cost (anything|time|memory)
            do branches share (blocks|memory|the cache)
        """,
        weight=2,
    ),
    topic(
        "A small draft model guesses some tokens ahead, and the target model checks them all in "
        "one step. The answer stays the same.",
        "Every accepted guess saves a step of the large model. /spec auto turns it off where it "
        "does not pay.",
        "A small model guesses, the large one checks.",
        "draft|guess|small & check|verif|same",
        names="""
            (speculation|speculative decoding|speculative sampling|speculating)
            spec decoding
            (drafting|assisted generation)
            speculation in kvchat
        """,
        questions="""
            how does (speculation|speculative decoding|kvchat guess|kvchat speculate) (work|help|
                make it faster|ahead)
            (why|how) does speculation (make it faster|help|speed things up|save time)
            (does|will|can) (speculation|speculative decoding|the draft|a draft|
                drafting) change the (answer|answers|text|result|output|quality)
            is the answer (the same|different|worse) with speculation
            what is the benefit of (speculation|a draft model)
        """,
        weight=2,
    ),
    topic(
        "The draft model is a small, quick model that guesses tokens for the target. It must share "
        "the target's tokenizer.",
        "Choose it with --draft: a model, ngram, or none. The demo model brings its own draft.",
        "The draft is the small model that guesses.",
        "small|quick & guess",
        names="""
            (a|the) (draft|draft model|drafter|assistant model|small model)
            draft models
            the (demo draft|shipped draft)
        """,
        tasks="""
            (choose|use|set|pick|change|load|add) a (draft|draft model|drafter)
            use another draft [model]
            (start|run) with a draft model
        """,
        questions="""
            what (does|is) the draft model (do|for|good for)
            (which|what) draft (is used|can I use|model do you have)
            why (are there|do we need) two models
            why is there a (second|small|draft) model
        """,
    ),
    topic(
        "The n-gram draft needs no second model: it copies what followed the same words earlier in "
        "the chat. Start it with /spec ngram.",
        "It helps with text that repeats, such as code edits or quotes. --draft ngram turns it on "
        "from the start.",
        "It guesses by copying earlier text.",
        "ngram|copies|copying",
        names="""
            (an|the) (n-gram|ngram|n gram) (draft|drafter|speculation|mode)
            (ngram|n-gram)
            ngram (drafting|speculation)
            /spec ngram
        """,
        tasks="""
            (speculate|draft) without a (second|draft) model
            (use|turn on|start) (ngram|n-gram) [speculation|drafting]
            draft from the text itself
        """,
    ),
    topic(
        "The acceptance rate is the share of drafted tokens that the target accepts. The line "
        "under each answer shows it.",
        "The more tokens are accepted, the fewer steps the target needs. Free text is accepted "
        "less often than text that repeats.",
        "It says how many guesses were right.",
        "accept|right",
        names="""
            (the|an) (acceptance rate|acceptance|accepted length|acceptance length)
            (accepted tokens|drafted tokens|draft accepted)
        """,
        questions="""
            how (good|often right|accurate) is the draft
            how many (tokens|guesses|drafts) (are|were) (accepted|right)
            what (does|is) (draft 74% accepted|percent accepted|
                the percentage of accepted tokens) [mean]
            (why is|what if) the acceptance [rate] [is] low
        """,
    ),
    topic(
        "A token is a piece of text, often a word or part of one. Models read and write tokens.",
        "/context shows how many tokens this chat uses, and the line under each answer counts "
        "them.",
        "A token is a small piece of text.",
        "piece|part",
        names="""
            (a|one|the) token
            tokens
            token ids
            (tokenization|tokenisation|a tokenizer|the tokenizer)
        """,
        questions="""
            how (long|big) is a token
            is a token a word
            how (is|does) (text|a word) (become|turned into|split into) tokens
            how many (words|letters) are in a token
            what do models read
        """,
    ),
    topic(
        "The context is all text the model can see at once: system prompt, messages and answers. "
        "/context shows how full it is.",
        "When it gets full, /new starts a fresh chat. The demo model holds 4,096 tokens.",
        "The context is what the model can see.",
        "see|text",
        names="(the|a) (context|context window|context length|context size|model context); context",
        questions="""
            how (long|big|large) is a context [window]
            how (long|much) can (a chat|this chat|my text|a conversation) be
            what happens (if|when) the (context|chat|conversation) (is|gets) (full|too long|too big)
            how much text (fits|can the model see|can you read)
            is there a limit to the length of (a chat|the conversation)
        """,
    ),
    topic(
        "Prefill is reading the prompt: the model computes keys and values for all its tokens. "
        "Decode then writes the answer token by token.",
        "Cached tokens skip the prefill. Long prefills show a bar with the tokens skipped and the "
        "time left.",
        "Prefill reads the prompt, decode writes the answer.",
        "read|prompt",
        names="""
            (prefill|prefilling|the prefill|chunked prefill)
            (decode|decoding|the decode step)
            prefill and decode
        """,
        questions="""
            what happens before the first (token|word)
            what does the model do first
            how does the model (read|process) a prompt
            (why does|what does) reading a (long prompt|long text) take (so long|time)
            what is the difference between prefill and decode
        """,
    ),
    topic(
        "What was read before is in the cache: only new tokens are computed, so the next answer "
        "starts much faster.",
        "That holds for the same chat, for its branches, and after a restart, when the blocks come "
        "back from disk.",
        "Old text is cached and not read again.",
        "cache|read before|already",
        questions="""
            why (is|was) (the next|this|that|my last|the last) (answer|reply|message) (so fast|
                so quick|faster|quicker|there at once)
            why (are|is) (you|it|kvchat|this|the answer|the reply) so (fast|quick)
            (why|how) (does|can|is) kvchat (answer so fast|so fast|start so fast|faster than others|
                so quick)
            why (does|did) the first (answer|reply|message) take (so long|longer|more time)
            (why|how) is (a resumed|an old|yesterday's) (chat|conversation) so fast
            what makes (kvchat|it|you|this) (fast|so fast|so quick)
            how (is|can) an old chat (be|resume|continue|start) so (fast|quickly)
            does (kvchat|it) get faster (over time|with time|later)
            what is the (speed|performance) (trick|secret)
            why do (later|new|short) messages (start|come) (faster|at once)
        """,
        weight=2,
    ),
    topic(
        "Changing the system prompt, the model or an early message changes all tokens after it, so "
        "these must be read again. /cache why shows where.",
        "The line under the answer also says why: system prompt changed, model changed, evicted or "
        "corrupt.",
        "Text after a change must be read again.",
        "again|/cache why",
        questions="""
            why (was|is|did) (nothing|my chat|the chat|this|it) (cached|not cached|cold|slow|
                read again|recomputed)
            why (is|was) (it|this|the answer|kvchat|the first token) [so] slow [this time|today|now]
            why does (it|kvchat|the model) read (everything|the whole chat|my chat|all of it) again
            (when|why) is the cache (not used|useless|missed|cold)
            what (breaks|invalidates|destroys) the cache
            (what is|explain|why is there) a cache miss
        """,
    ),
    topic(
        "A broken or missing block is only a miss: kvchat computes it again. Text is never lost, "
        "and nothing from disk is trusted unchecked.",
        "Blocks are stored with their tokens and a checksum, both checked when they are loaded. "
        "/cache verify checks them all.",
        "A broken cache costs time, never words.",
        "again|miss",
        questions="""
            what (happens|if|happens if) the cache (is|gets) (broken|damaged|corrupt|corrupted|lost|
                deleted|destroyed)
            (can|may) I delete the cache [folder|directory]
            is it safe to (delete|clear|remove) the cache
            what (if|happens if) a block is (broken|damaged|corrupt|missing)
            what if (the disk|my disk) (is full|fails|breaks)
            (can|could) a (bad|broken|corrupt) cache (break|change|harm) my (chat|answers)
        """,
    ),
    topic(
        "Every word is saved as it happens, and the full blocks after each turn. After a restart "
        "the chat goes on where it was.",
        "Even a killed process costs at most the cache of the current turn and the last second of "
        "an answer.",
        "Chats survive a restart, words and cache.",
        "saved|restart|survive",
        questions="""
            what (happens|is lost) (after|when|if) (a restart|I restart|a crash|kvchat crashes|
                the power goes out|I close the terminal|I turn off the computer|I reboot|
                kvchat is killed)
            (is|are) (my chat|my chats|my words|this chat|the conversation|
                everything) saved [automatically|when I leave]
            do I (have to|need to) save (my chat|this|the chat|anything)
            (will|is) (my|this|the) (chat|conversation) (be lost|lost|gone|there) (when I quit|
                after a restart|tomorrow|if I close the window|if it crashes)
            does kvchat save (chats|my chats|everything|conversations)
        """,
        weight=1.5,
    ),
    topic(
        "A pinned context is a document you keep warm with /pin: a later chat that begins with it "
        "does not read it again.",
        "For example /pin manual docs/*.md. Pinned contexts stay on disk while there is room; "
        "/unpin lets one go.",
        "It is a document kept ready in the cache.",
        "/pin|warm|kept",
        names="""
            (a|the) (pinned context|pinned document|pinned file|pin)
            pinned (contexts|documents|files)
            pinning
        """,
    ),
    topic(
        "It shows the tokens that came from the cache and where from, the tokens read, the time to "
        "the first token, the speed, the drafts accepted and the context used.",
        "F2 or /stats off hides it. In scripts, --stats prints it to stderr.",
        "It sums up cache, speed and context of the answer.",
        "cache|tokens & speed|first token",
        names="""
            (the|this) (statistics line|stats line|status line|dim line|grey line|gray line|
                line under the answer|line below the answer|numbers below the answer)
        """,
        questions="""
            what (is|does|means) the (line|text|numbers|grey line|small line) (under|below|
                after) (the|each|your|every) (answer|reply) [mean|say]
            how do I read the statistics
            what do the numbers mean
            what does cached 3,812/3,904 mean
            what is (TTFT|first token 84 ms|the time to first token)
        """,
    ),
    topic(
        "Branches, restarts and shared prompts are where kvchat is ahead: it keeps their KV cache, "
        "where many others read the text again.",
        "kvchat bench measures it on your machine, beside its peers and ceilings.",
        "Many others read again what kvchat remembers.",
        "again|cache|ahead",
        questions="""
            how (is|does) kvchat (compare|different|better|compared) [to|than|with|from] (ollama|
                llama.cpp|lm studio|vllm|other programs|others|chatgpt|llm)
            (kvchat|is kvchat|is it|is this) (or|like|better than|faster than|the same as) (ollama|
                llama.cpp|vllm|lm studio|other programs)
            why not (use ollama|llama.cpp|vllm|use another program)
            what can kvchat do that (others|ollama|llama.cpp) (can't|cannot)
            what is the difference between kvchat and (ollama|llama.cpp|vllm|others|
                other chat programs)
        """,
    ),
)
