"""What kvchat is and how its cache works, as the demo model explains it, in simple words."""

from demo_recipe.dialogues.knowledge.topic import topic

MEMORY = (
    topic(
        "kvchat is a terminal chat program for language models on your own machine. It never reads "
        "the same conversation twice.",
        "It keeps the KV cache of every chat in blocks, on the device, in memory and on disk, so "
        "an old chat answers at once.",
        "kvchat runs local models and remembers what it has read.",
        "kvchat & own machine|local",
        names="""
            kvchat
            this program
            this tool
            this app
            this software
            the program
            the kvchat project
        """,
        questions="""
            what (is|does) (kvchat|this program|this tool|this app) [do]
            what is this program (for|good for|about)
            what is kvchat (for|good for|about|exactly)
            what can (kvchat|this program|this app) do [for me]
            what makes kvchat (special|different|better|unique)
            why (should I use|use|would I use|is there) kvchat
            (where am I|what did I start|what have I started|what is going on here)
            what is this (thing|place|prompt|window)
            (how|why) is kvchat (better|different|special|useful)
            what is the (point|idea|purpose|goal) of (kvchat|this program|this)
            tell me about (kvchat|this program|this app)
            who is kvchat for
            kvchat [in one sentence|in a nutshell]
        """,
        weight=3,
    ),
    topic(
        "The KV cache holds the keys and values the model computed for each token, so old text is "
        "never read again.",
        "Without it every new token would need the whole chat to be computed anew. kvchat keeps it "
        "in blocks and saves it to disk.",
        "It is the model's notes on the text it has read.",
        "keys|notes & read",
        names="""
            (a|the) (KV cache|kv-cache|kvcache|key-value cache|key value cache)
            (KV|kv) (cache|caching)
            KV
            the cache
            caching
            (keys and values|the keys and values)
        """,
        questions="""
            what is (stored|saved|kept) in the (KV cache|cache)
            what (do|does) (KV|kv) (mean|stand for)
            (what are|explain) keys and values
            why does (a chat|kvchat|a model) need a cache
            what does the cache (hold|contain|store|do)
            how does caching (work|help) [in kvchat]
        """,
        weight=3,
    ),
    topic(
        "Paging splits the KV cache into blocks of equal size, so memory is used where it is "
        "needed and blocks can be shared.",
        "Each chat has a block table that lists its blocks in order. Two chats with the same "
        "beginning share the same blocks.",
        "Paging means the KV cache lives in small blocks.",
        "block",
        names="""
            (paging|paged attention|paged KV cache|the paged cache|a paged KV cache|paged memory)
            (the|a) (block table|paged pool|block pool|page table)
            (pages|memory pages|KV pages)
        """,
        questions="""
            (why|how) is the (cache|KV cache) (paged|split|cut|divided) [into blocks]
            (why|how) does kvchat (page|split|use paging|use pages)
            how is (memory|the cache) (organized|organised|divided|managed)
            what does paged mean
            how does kvchat (manage|use|share) memory
        """,
        weight=2,
    ),
    topic(
        "A block holds the keys and values of a fixed number of neighbouring tokens. Full blocks "
        "are shared and saved.",
        "A block's key depends on its tokens, on all tokens before it and on the model, so a block "
        "is never used for other text.",
        "A block is a fixed number of tokens in the cache.",
        "tokens & full|fixed",
        names="""
            (a|the) block
            blocks
            (cache|KV|memory) blocks
            a (cache|KV) block
            (full|shared) blocks
        """,
        questions="""
            how (big|large) is a block
            what is in a block
            what does a block (hold|contain|store)
            how many tokens are in a block
            when are blocks (shared|saved|full)
            why are there blocks
        """,
    ),
    topic(
        "Prefix matching finds the longest beginning of your prompt that is already in the cache. "
        "Only the rest is computed.",
        "A radix tree of blocks finds it, also across chats: a shared system prompt or document is "
        "read once.",
        "It reuses the part of the prompt that was read before.",
        "longest|already|reuse|before",
        names="""
            (prefix|the prefix) (matching|match|caching|cache|reuse|sharing)
            (the|a) prefix [match|cache]
            (the|a) radix tree
            radix (tree|attention|cache)
        """,
        questions="""
            how does kvchat (find|know|recognise|recognize) what is (cached|already read|
                in the cache)
            how does kvchat reuse (old text|the cache|old chats|what it has read)
            what is (a radix tree|the radix tree|the tree of blocks) (for|good for)
            (can|do) (two|several|many) chats share (the cache|memory|blocks|a prefix|
                a system prompt)
            what is shared between (chats|branches|conversations)
        """,
        weight=2,
    ),
    topic(
        "There are three tiers: the device, host memory beside a GPU, and disk. Cold blocks sink "
        "down, and come back up when needed.",
        "Moving down is called demote, moving up promote. What is cheaper to compute again than to "
        "load is computed again.",
        "The tiers are device, host memory and disk.",
        "device|gpu & disk",
        names="""
            (the|cache|memory|storage) tiers
            (a|the|one) tier
            (the|a) (device tier|host tier|disk tier|disk cache|host cache|device cache)
            (tiering|tiered cache|tiered caching|the cache hierarchy|the memory hierarchy)
        """,
        questions="""
            (what|which) tiers (are there|exist|does kvchat have)
            how many tiers are there
            where (is|are) (the cache|blocks|the KV cache|cached blocks) (kept|stored|saved|held)
            what happens (if|when) (the memory|memory|the GPU|the device|my GPU|video memory|
                the VRAM) (is full|runs out|fills up|is used up|is too small)
            what (if|happens if) (I run|it runs) out of (memory|GPU memory|VRAM|device memory)
            (can|does) the cache (go|spill|move) to (disk|memory|RAM)
            where do (old|cold|unused) blocks go
        """,
        weight=2,
    ),
    topic(
        "To demote is to copy a block to a lower tier, so that the place above can be used again. "
        "To promote is to bring it back up.",
        "Blocks go from the device to host memory and to disk, and back when a prompt needs them.",
        "Demote moves a block down, promote moves it up.",
        "down|lower & up|back",
        names="""
            (demote|demotion|demoting|promote|promotion|promoting)
            (demote|promote) and (promote|demote)
            (demotion|promotion) [of blocks]
            (demoting|promoting) (a block|blocks)
        """,
        questions="""
            when is a block (demoted|promoted)
            how do blocks move (up|down|between tiers)
            what does it mean that a block (is demoted|is promoted|sinks|comes back)
            (why|when) are blocks (demoted|promoted|moved down|moved up)
        """,
    ),
    topic(
        "Eviction forgets the blocks worth least, when the last tier is full. The text itself is "
        "never lost.",
        "What was used often leaves late, pinned contexts last. Evicted blocks are simply "
        "computed again.",
        "Eviction drops old blocks, never text.",
        "never|forget|drop & lost|text|again",
        names="""
            (eviction|evicting|evicted blocks|cache eviction|the eviction rule)
            an evicted block
        """,
        questions="""
            what (is|gets) evicted [first]
            when (is|are) (a block|blocks|something) (evicted|forgotten|dropped|deleted)
            what happens (if|when) the (disk|disk cache|cache) is full
            do I lose (my chat|text|words|anything) when (the cache is full|blocks are evicted)
            which blocks (leave|go|are dropped) first
        """,
    ),
)
