"""Command line flags, as the demo model explains them. Follows `kvchat --help`."""

from demo_recipe.dialogues.knowledge.topic import topic

FLAGS = (
    topic(
        '-p TEXT asks one question and prints one answer: kvchat -p "hello".',
        "stdout carries the answer and nothing else. Piped text is the message, and -p is appended "
        "to it.",
        "-p asks one question.",
        "-p",
        names="""
            -p
            --prompt
            the (-p|--prompt) (flag|option)
            (one-shot|single-shot|a one-shot) (mode|prompt|answer|question)
        """,
        tasks="""
            ask (one|a single|just one|only one) question [from the shell|on the command line]
            (use|call|run) kvchat (in a script|from a script|in a shell script|from the shell|
                non-interactively|without a terminal)
            (get|print) (one answer|a single answer|just the answer)
            (give|pass|send) a (prompt|question) on the command line
            (ask|run) without (the interactive prompt|a terminal|opening a chat)
            (script|automate) kvchat
        """,
    ),
    topic(
        'Pipe text into kvchat: cat notes.txt | kvchat -p "sum up". Piped text is one message.',
        "--input-format lines makes every line a turn, and jsonl makes every line a request.",
        "Piped text becomes the message.",
        "pip|input-format",
        names="""
            (piping|pipes|a pipe|stdin|standard input|piped input)
            --input-format
            the --input-format (flag|option)
            (input-format lines|jsonl input)
        """,
        tasks="""
            (pipe|send|feed) (text|a file|output|data|a log) (into|to|through) kvchat
            (use|read from) (stdin|a pipe|standard input)
            (read|take) the prompt from (stdin|a file|a pipe)
            (send|run|process) (many|several|a list of|a batch of|a file of) (prompts|questions|
                requests) [at once|as a batch]
            (combine|use) kvchat with (other programs|cat|grep|git diff)
        """,
    ),
    topic(
        "-c continues the last conversation: kvchat -c. --continue is the long form.",
        "kvchat -r ID resumes a particular one, and /resume lets you pick inside the chat.",
        "-c continues the last chat.",
        "-c\\b|--continue",
        names="-c; --continue; the (-c|--continue) (flag|option)",
        tasks="""
            (continue|resume|open|reopen) (the last|my last|the most recent|the latest) (chat|
                conversation|session) (from the shell|from the command line|on start|at once|
                directly)
            (start|open) kvchat with (the last|my last) (chat|conversation)
            (continue|go on) from the shell
        """,
    ),
    topic(
        "-r ID resumes the conversation with that id; --resume is the long form.",
        "kvchat sessions list shows the ids. Add --fork to leave the original as it is.",
        "-r resumes a particular chat.",
        "-r\\b|--resume|/resume",
        names="-r; --resume; the (-r|--resume) (flag|option); (a session id|session ids)",
        tasks="""
            (resume|open|continue) a (certain|specific|particular) (chat|conversation|
                session) [by id|from the shell]
            (resume|open) (a chat|a session) by (id|its id|number)
            use (a|the) session id
        """,
    ),
    topic(
        "--temperature sets how random the answers are: 0 always takes the most likely token, "
        "higher values vary more.",
        "/set temperature 0.7 changes it inside the chat. --seed makes random answers repeatable.",
        "The temperature sets the randomness.",
        "temperature",
        names="""
            --temperature
            (the|a) temperature
            the --temperature (flag|option)
            temperature 0
            (greedy|greedy decoding)
        """,
        tasks="""
            (set|change|raise|lower|adjust|use) the temperature
            (make|get) (the answers|answers|you|the model) (more|less) (random|creative|wild|boring|
                predictable)
            (get|have) (the same answer every time|deterministic answers|repeatable answers|
                always the same answer)
            (decode|sample) greedily
            use greedy decoding
            (control|reduce|increase) (randomness|creativity|the randomness)
        """,
        weight=1.2,
    ),
    topic(
        "--top-p, --top-k and --min-p limit which tokens may be drawn: by total probability, by "
        "number, or by share of the best.",
        "With --temperature 0 they change nothing.",
        "They cut off unlikely tokens.",
        "top-p|top-k|min-p|token",
        names="""
            --top-p
            --top-k
            --min-p
            (top-p|top-k|min-p|top p|top k|min p)
            (nucleus sampling|sampling options|sampling)
            the (--top-p|--top-k|--min-p) (flag|option)
        """,
        tasks="""
            (set|change|use) (top-p|top-k|min-p|nucleus sampling)
            (limit|restrict) (the tokens|which tokens are drawn)
            (avoid|cut off) unlikely (tokens|words)
            control the sampling
        """,
    ),
    topic(
        "--repetition-penalty above 1 makes the model repeat itself less.",
        "1 switches it off. Small steps such as 1.1 are enough.",
        "It keeps the model from repeating itself.",
        "repetition-penalty|repeat",
        names="""
            --repetition-penalty
            (the|a) repetition penalty
            the --repetition-penalty (flag|option)
        """,
        tasks="""
            (stop|prevent|keep|avoid) (repetition|repetitions|the model from repeating itself|
                repeated answers|loops)
            (make|let) (you|the model) repeat (less|itself less|yourself less)
            (set|use|change) the repetition penalty
            reduce repetition
        """,
        questions="""
            (you|the model) (repeat yourself|repeats itself|is in a loop|keeps repeating the same)
            why do you repeat yourself
        """,
    ),
    topic(
        "--seed fixes the random numbers, so the same chat gives the same answer again.",
        "With --temperature 0 no seed is needed.",
        "--seed makes answers repeatable.",
        "--seed|same",
        names="--seed; (the|a) [random] seed; the --seed (flag|option)",
        tasks="""
            (set|fix|use|change) (the|a) [random] seed
            (reproduce|repeat) an answer exactly
            (make|get) random answers (repeatable|reproducible)
        """,
    ),
    topic(
        "--max-tokens limits the length of an answer; --stop TEXT ends it at a text, in scripts "
        "--timeout S after some seconds.",
        "/continue goes on with an answer that --max-tokens has cut.",
        "--max-tokens limits the answer.",
        "--max-tokens|--stop|--timeout",
        names="""
            --max-tokens
            --stop
            --timeout
            the (--max-tokens|--stop|--timeout) (flag|option)
            (a|the) (stop text|timeout|token limit|stop string|time limit)
        """,
        tasks="""
            (limit|set|restrict|shorten|change) the (length|maximum length|size) of (an answer|
                answers|the answer|the reply)
            (get|have|make|force) (short|shorter|long|longer|brief) answers
            (set|use) a (time limit|timeout|token limit|stop text|stop string)
            (stop|end|cut) (answers|an answer) (after some seconds|at a word|after 100 tokens|
                at a certain text|early)
            stop after (ten seconds|some time|a minute)
        """,
    ),
    topic(
        "-n 4 asks for four answers at once; --samples is the long form. They share the prompt's "
        "blocks.",
        "Inside a chat, /retry -n 4 does the same.",
        "-n asks for several answers.",
        "-n\\b|--samples",
        names="-n; --samples; the (-n|--samples) (flag|option)",
        tasks="""
            (sample|print) (four|several|many|3|multiple) (answers|
                samples) (from the shell|at once|on the command line|in one call)
            sample several (answers|times)
        """,
    ),
    topic(
        "--json prints the answer as one JSON object with usage and timing; --output-format "
        "stream-json prints events as they come.",
        "The object holds the text, why it ended, cached and new tokens, and seconds.",
        "--json prints JSON.",
        "--json|json",
        names="""
            --json
            --output-format
            stream-json
            the (--json|--output-format) (flag|option)
            (json|JSON) output
        """,
        tasks="""
            (get|print|have|output|parse) (json|JSON|the answer as json|machine readable output|
                structured output)
            (use|read) the (answer|output|timing) in (a program|python|a script)
            (stream|print) events
            change the output format
        """,
    ),
    topic(
        "--incognito writes nothing to disk: no chat, no cache, no history.",
        "Without it every conversation is saved as it happens. /forget removes one afterwards.",
        "--incognito saves nothing.",
        "incognito",
        names="""
            --incognito
            (incognito|incognito mode|private mode|the private mode)
            the --incognito (flag|option)
        """,
        tasks="""
            (chat|talk|ask|work) (privately|in private|in secret|without saving|without a trace|
                incognito|without leaving traces)
            (turn off|disable|stop|prevent|avoid) (saving|the saving of chats|the history|
                storing chats|logging)
            (keep|make) (my chat|this chat|a chat) (private|secret|off the disk|unsaved)
            not (save|store|keep|record) (anything|my chat|this chat|chats)
            (save|store|write|keep) nothing [on disk]
        """,
        questions="""
            (don't|do not) save (this|my chat|anything|this chat) [please]
            can I chat without (saving|being saved|a record|history)
            (is there a|do you have a) (private|incognito|secret) mode
            I (want|need) (privacy|a private chat|no history|no traces)
        """,
        weight=1.3,
    ),
    topic(
        "--no-cache never reuses a cache, and --cache-dir DIR puts the cache elsewhere.",
        "/cache path shows where it is. The chat itself is still saved; --incognito saves nothing.",
        "--no-cache runs without the cache.",
        "--no-cache|--cache-dir",
        names="""
            --no-cache
            --cache-dir
            the (--no-cache|--cache-dir) (flag|option)
            the cache (directory|folder)
        """,
        tasks="""
            (run|chat|start|work) without (the|a|any) cache
            (disable|turn off|switch off) (the cache|caching)
            (move|put|change|set) the cache (directory|folder|elsewhere|to another disk|
                somewhere else)
            (change|choose) where the cache (is|is kept|lives|is stored)
        """,
        questions="""
            where on disk is the cache
            (which|what) (folder|directory) holds the cache
        """,
    ),
    topic(
        "--device-cache, --host-cache and --disk-cache set the size of each tier, such as 8G, 512M "
        "or 20%.",
        "The limits hold at every instant.",
        "They limit the tiers.",
        "-cache",
        names="""
            --device-cache
            --host-cache
            --disk-cache
            the --(device|host|disk)-cache (flag|option)
            cache (sizes|limits)
        """,
        tasks="""
            (limit|set|change|increase|reduce|control) (the size of the cache|the cache size|
                how much memory the cache uses|cache sizes|the disk cache size)
            (use|give kvchat|take) (less|more) (memory|disk|disk space|RAM|
                GPU memory) [for the cache]
            (set|give|choose) a (limit|maximum) for the (cache|disk cache|memory)
            (make|keep) the cache (smaller|bigger|small|large)
        """,
        questions="""
            how (big|large) (is|can|may) the cache (get|be|grow)
            how much (disk|memory|space) does (the cache|kvchat) (use|need|take)
        """,
    ),
    topic(
        "--device auto, cpu or cuda chooses where the model runs; --dtype sets its number format.",
        "auto takes the GPU if there is one.",
        "--device chooses CPU or GPU.",
        "--device|gpu",
        names="""
            --device
            --dtype
            the (--device|--dtype) (flag|option)
            --device (cuda|cpu)
        """,
        tasks="""
            (use|run on|choose|select|force|switch to) (the|my|a) (GPU|graphics card|CPU|gpu|cpu)
            (run|start|load) (the model|kvchat|it) on (the GPU|the CPU|cuda|my graphics card)
            (set|change|choose) the (device|dtype|number format|precision)
            use (cuda|bfloat16|float16|float32)
        """,
        questions="""
            (do I need|does kvchat need|is there a need for) a (GPU|graphics card)
            (does|can) (kvchat|it|this) (work|run) (on a CPU|without a GPU|on a laptop|on my laptop|
                on a GPU|on cuda)
            (is|are) (GPUs|the GPU|my GPU|cuda) (supported|used)
        """,
    ),
    topic(
        "kvchat serve offers the model to other programs at http://127.0.0.1:8642, as OpenAI and "
        "Anthropic do.",
        "--host, --port and --api-key change where it listens and who may ask.",
        "kvchat serve is an HTTP server.",
        "kvchat serve",
        names="""
            kvchat serve
            serve
            the (server|http server|api|openai api|anthropic api|rest api|http interface)
            (--host|--port|--api-key)
        """,
        tasks="""
            (start|run|open|use) (the server|a server|the api|the http server|kvchat as a server|
                an openai server|an api server)
            (serve|offer) (the model|a model) [over http|to other programs|to my editor]
            (use|call|reach|ask) kvchat (from another program|from my editor|over http|with curl|
                from python|from aider|through an api)
            (connect|point) (my editor|an agent|open webui|another program|aider) to kvchat
        """,
        questions="""
            (does|has) kvchat (have|got) (an api|a server|an http interface|an openai api)
            (can|could) other programs use (kvchat|the model|the cache)
            is there (an api|a server|an openai api)
        """,
        weight=2.2,
    ),
    topic(
        "kvchat --endpoint URL chats with the model of another server: llama.cpp, vLLM, SGLang, "
        "ollama and others.",
        "Keys come from the environment or a keyring. --endpoint none uses no server at all.",
        "--endpoint uses another server.",
        "--endpoint",
        names="""
            --endpoint
            the --endpoint (flag|option)
            (another|a remote|an external) (server|engine|endpoint)
        """,
        tasks="""
            (connect|talk|chat) (to|with) (a server|another server|a remote server|a remote model|
                an endpoint|my ollama server|llama-server|a vllm server|an openai server)
            (use|reach) (a model on another machine|a remote model|another engine|
                my vllm server|llama.cpp's server|the ollama server)
            use (vllm|sglang|llama-server) (with|from|in) kvchat
        """,
        weight=2,
    ),
    topic(
        "kvchat -m takes a GGUF file too, as in kvchat -m model-Q4_K_M.gguf, and ollama's models: "
        "-m ollama:llama3.2.",
        "Usual GGUF blocks stay as they are, so the model needs no more memory than its file.",
        "-m takes a GGUF file.",
        "-m",
        names="""
            (gguf|gguf files|a gguf file|the gguf format|a quantised file|ollama models|
                a Q4_K_M file)
        """,
        tasks="""
            (use|open|load|run|start|read) (a gguf|a gguf file|gguf files|a quantized model|
                a quantised model|a 4-bit model|a llama.cpp model|an ollama model|a model of ollama)
            (run|use) (a model|the models|what I pulled) (from|of|with) ollama
            (load|use) a gguf from (hugging face|the hub|my disk)
        """,
        questions="""
            (does kvchat|can kvchat|can you) (read|run|open|load|support|use) (gguf|gguf files|
                quantised models|ollama models|ollama's models)
            (is|are) (gguf|gguf files|4-bit models|quantised models) supported
        """,
        weight=2,
    ),
    topic(
        "--adapter DIR merges a LoRA adapter into the model.",
        "The adapter is part of the model's identity, so its KV is never mixed with another's.",
        "--adapter merges a LoRA.",
        "--adapter",
        names="--adapter; the --adapter (flag|option); (lora|a lora|an adapter|lora adapters)",
        tasks="""
            (use|load|merge|apply|add) (a lora|an adapter|a lora adapter|my adapter|
                a fine-tuned adapter)
            run a fine-tuned model [with an adapter]
        """,
        weight=1,
    ),
    topic(
        "--weights int8 or int4 holds the linear layers of a model in fewer bits.",
        "It takes less memory. int4 changes the answers more than int8 does.",
        "--weights holds the model in fewer bits.",
        "--weights",
        names="""
            --weights
            --weights (int8|int4)
            the --weights (flag|option)
            (quantization|quantisation|int8|int4|quantized weights|8-bit weights|4-bit weights)
        """,
        tasks="""
            (quantize|quantise|compress|shrink) (a model|the model|the weights|my model)
            (use|load|run|have|get) (int8|int4|8-bit|4-bit|quantized|quantised) (weights|models)
            (load|run) a model (in fewer bits|in 8 bits|in 4 bits|with less memory)
        """,
    ),
    topic(
        "--draft chooses the draft: a model, a directory, a hub id, ngram, or none.",
        "The draft must share the target's tokenizer. --no-spec turns guessing off.",
        "--draft chooses the draft model.",
        "--draft",
        names="--draft; the --draft (flag|option); --draft (ngram|none)",
    ),
    topic(
        "--color auto, always or never sets colours, and NO_COLOR is obeyed. --accessible turns "
        "off colour, toolbar and motion.",
        "ACCESSIBLE=1 does the same: numbered lists, no spinner, no cursor motion.",
        "--accessible makes the screen plain.",
        "--accessible|--color",
        names="""
            --accessible
            --color
            the (--accessible|--color) (flag|option)
            (accessibility|the accessible mode|accessible mode|NO_COLOR)
        """,
        tasks="""
            (use|run) (kvchat|this|it) with a (screen reader|braille display)
            (turn off|disable|remove|change) (colours|colors|the colours|the colors|animations|
                the toolbar|the spinner)
            (have|get|use) (no colours|no colors|plain text|a plain screen|black and white)
            make (kvchat|it|the screen) (accessible|plain|simpler)
        """,
    ),
    topic(
        "--title TEXT names the conversation, --version prints the version, -h the help, -q keeps "
        "quiet.",
        "Errors are one sentence on stderr; --debug adds a traceback.",
        "Small flags: --title, --version, -h, -q.",
        "--title|--version|-h|-q|--debug",
        names="""
            --title
            --version
            --help
            -h
            -q
            --quiet
            --debug
            the (--title|--version|--help|-q|--debug) (flag|option)
        """,
        tasks="""
            (see|print|know|check) (the version|which version I have|the version of kvchat)
            (see|print) (the shell help|all flags|the usage)
            (make|keep) kvchat quiet
            (see|get) a traceback
        """,
        questions="""
            (what|which) (flags|options) (are there|does kvchat have|exist)
            (what|which) version (is this|do I have|of kvchat is this)
            list (the|all) flags
        """,
    ),
)
