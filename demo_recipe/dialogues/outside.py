"""Frames of out-of-scope prompts, by kind of request; `fallback` fills the slots."""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases
from demo_recipe.voice import Kind


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of request."""

    kind: Kind
    phrases: Phrases
    weight: float = 1.0

    @property
    def parts(self) -> tuple[Kind, Phrases]:
        return self.kind, self.phrases


FACTS = Phrases("""
    (what is|what's|what are|what was|what were) {topic}
    (who|where|when) (is|was|are|were) {topic}
    how (does|do|did|is|are|was) {topic} (work|made|start|end|begin|used|measured|formed|different)
    why (is|are|was|were) {topic} (important|so popular|so expensive|dangerous|useful|famous|bad|
        good|rare)
    (explain|describe|define|discuss|analyze|outline|summarize) {topic} [in detail|briefly|
        to a child|in simple terms|for beginners|step by step]
    (tell|teach) me (about|something about|everything about|a fact about|more about) {topic}
    (who|what) (invented|discovered|created|caused|started|founded|wrote|painted|built) {topic}
    when (was|were|did) {topic} (invented|discovered|happen|begin|end|built|founded)
    what (is|are) the (difference|similarities|connection|relationship) between {topic} and {topic2}
    compare {topic} (and|with|to) {topic2}
    (what|which) is (better|worse|older|more important|faster|cheaper|
        healthier), {topic} or {topic2}
    {topic} or {topic2}
    what are the (pros and cons|benefits|advantages|disadvantages|causes|effects|symptoms|types|
        origins|risks|uses|rules|basics) of {topic}
    what (causes|influences|threatens|happens to) {topic}
    (is|are) {topic} (real|true|dangerous|healthy|good for me|worth it|overrated|legal|possible|
        safe|a good idea)
    (give|tell|list|show) me (some|three|five|ten|interesting) (facts|examples|ideas|quotes|
        tips) (about|of|on|for) {topic}
    (what|how much) do you know about {topic}
    (I want|I need|I'd like) to (know|learn|read|write) [more] about {topic}
    (how|what) did {person} (die|do|discover|write|say|become famous|live|look like)
    (who|what) (is|was) {person} [to the world|really]
    when (was {person} born|did {person} die|did {person} live)
    where (was {person} born|did {person} live|is {person} from)
    (tell|teach) me about [the life of] {person}
    (how old|how tall|how rich|how famous) (is|was) {person}
    what (is|was) {person} (famous|known|remembered) for
    is {person} (alive|dead|married|real|still alive|a good person)
    how many {things} are there [in the world|in {country}]
    (what|which) {things} (are the best|should I know|are in {country}|start with b|are dangerous)
    (name|list|give me) (some|five|ten|three|all) (famous|good|rare|old|popular|cheap|
        typical) {things}
    who (was|is) the (first|best|last|greatest|most famous) {job} (in the world|of all time|
        in {country})
""")
PLACES = Phrases("""
    (what|which) (is|city is) the capital of {country}
    capital of {country}
    what is the (population|area|currency|language|flag|anthem|climate|religion|president|king|food|
        time zone) of {country}
    (how many|how much) people (live|are) in {country}
    where is {city} [located|on the map]
    where is {country} [on the map]
    how far is {city} from {city2}
    how (do|can) I get from {city} to {city2} [by train|by car|by plane]
    (what|which) language do they speak in {country}
    what (can|should) I (see|do|visit|eat) in {city}
    what is {city} (famous|known) for
    what's the weather (in|like in) {city} [today|tomorrow|in may]
    is {city} (bigger|older|more expensive|nicer) than {city2}
    when is the best time to (visit|travel to|see) {country}
    (plan|suggest|organize) a (trip|holiday|weekend|tour) (to|in) {city} [for two|for three days]
    (what|which) (river|ocean|mountain|lake) is (near|in|close to) {city}
    what time is it in {city}
    how (expensive|cheap|safe|cold|big) is {city}
    (find|book) [me] a (hotel|flight|restaurant|train) (in|to) {city}
    (what|which) countries border {country}
    do I need a visa for {country}
    who is the (president|king|queen|prime minister|leader) of {country}
    tell me about {country}
    the history of {country}
""")
WRITING = Phrases("""
    (write|draft|compose|create|prepare) [me] (a|an) {text} (about|on|for|to|regarding) {topic}
    (write|draft|compose) (a|an) {text} (to|for) my (boss|teacher|landlord|friend|company|mother|
        team|students)
    (write|give me) (a|an) (long|short|formal|funny|persuasive|200 word|three page) {text} (about|
        on) {topic}
    (help me write|can you write|could you write|I need|I want|please write) (a|
        an) {text} [about {topic}]
    (rewrite|rephrase|paraphrase|improve|edit|proofread|correct) (this|the following|my) (sentence|
        text|paragraph|email|essay): {sentence}
    (translate|say|write) {sentence} (in|into|to) {lang}
    translate (this|the following|good day|hello world|I love you|the word {noun}|
        thank you very much) (into|to) {lang}
    how do you say {noun} in {lang}
    what (does|is) the {lang} word (for|of) {noun}
    what is {noun} in {lang}
    (summarize|summarise|explain|review) the (plot|book|film|story|ending|article|movie) [of|
        about] {topic}
    (summarize|shorten|explain) (this|the following): {sentence}
    (what is|give me|find) (a synonym|an antonym|synonyms|a rhyme|another word|a definition|
        the plural) (for|of) {noun}
    (what is|find) the (subject|verb|noun|grammar mistake|tense) in (this|the) sentence: {sentence}
    is this (correct|good english|grammatical): {sentence}
    (suggest|give me|invent|come up with) (a name|names|a title|a slogan|ideas) for (my|
        a) {noun} (shop|company|book|blog|band|app)
    (write|make) (a|an) {text} in the style of {person}
    (use|put) the word {noun} in a sentence
    make a sentence with {noun} and {noun2}
    (classify|label) (this|the following) (review|sentence|
        text) [as positive or negative]: {sentence}
    (act|behave|talk|speak|write) (as|like) (a|an) {job} [and answer my questions]
    (pretend|imagine) (you are|to be|that you are) (a|an) {job}
    (pretend|imagine) you are {person}
    (let's play|play|let us play) (a game|20 questions|hangman|truth or dare|a text adventure|
        tic tac toe|trivia|a quiz|word chain)
    you are (a|an) {job}, (help me|answer my question|what would you do)
    (ask|quiz|test) me (a riddle|a trivia question|about {topic}|a question about {topic})
    (tell|ask|give) me a riddle [about {noun}s]
""")
SUMS = Phrases("""
    (what is|what's|how much is|calculate|compute|) {big} (+|-|*|/|plus|minus|times|
        divided by) {big2}
    {big} (+|-|*|/|x|plus|minus|times|divided by) {big2}
    what is the (square root|cube root|square|cube|factorial|logarithm|half|double) of {big}
    (square root|sqrt|factorial|log) of {big}
    what is {few} (percent|%) of {big}
    (is|are) {big} (a prime|prime|a prime number|odd|even|divisible by 7|a square number)
    solve (x + {few} = {big}|{few}x = {big}|x^2 = {big}|{few}x + {big} = {big2}|
        for x: x - {big} = {few})
    (convert|how many|what is) {big} (miles in kilometers|km to miles|dollars in euros|
        pounds to kilograms|fahrenheit to celsius|inches in cm|hours in minutes)
    how many (seconds|minutes|hours|days|weeks) are in {big} (days|years|hours|weeks|months)
    (what is|find|compute) the (integral|derivative|limit|sum|average|median|mean) of ({few}x^2|
        sin x|x + {few}|{big}, {big2} and {few}|1/x)
    (a train|a car|a bus|a plane) travels {big} (km|miles) in {few} hours, (how fast is it|
        what is its speed)
    (what is|find) the (area|volume|perimeter|radius|circumference) of a (circle|square|triangle|
        cube|sphere) with (side|radius) {few}
    if {few} (workers|machines|painters) need {big} (days|hours|minutes), how long do {few} need
    {big} {noun}s cost {big2} dollars, how much (is|costs) one
    I have {big} dollars and spend {big2}, how much is left
    what (number|comes) (is|next): 2, 4, 8, {few}
    (write|say|what is) {big} in (binary|roman numerals|hexadecimal|words)
    {few} to the power of {few}
    {big} / {few}
    (round|simplify|factor) {big}.{big2}
    what is the probability of (rolling a six|two heads|drawing an ace|rain)
    prove that {few} is (even|odd|prime|smaller than {big})
    how old is somebody born in {year}
    what (happened|was) in {year}
    what day was (the first of may|christmas|my birthday) in {year}
""")
PROGRAMS = Phrases("""
    (write|give me|show me|make|create|code|I need|I want) (a|some) [short|simple|small] (function|
        method|class|script|program) (to|that can|which can|that is able to) {ctask} [in {l}]
    (write|give me|show me|make|create|code) a {l} (function|method|class|program|script) (to|
        that can|which can) {ctask}
    (write|give me|show me|make|create|code|I need|I want) (a|some) [short|simple|small] (function|
        method|class|script|program) that {does} [in {l}]
    (write|give me|show me|make|create|code) a {l} (function|method|class|program|script|
        tool) that {does}
    (can|could) you (write|make|code) (me a|a) [{l}] (function|script|program|tool|app) that {does}
    (I need|I want|is there) a [{l}] (function|script|program|tool) (that|which) {does}
    (can|could|would) you (write|code|make|give me) a [{l}] (function|method|program|script) (to|
        that can) {ctask} [in {l}]
    (a|one) [{l}] (function|method|class) (to|that can) {ctask} [please|in {l}]
    (write|give me|create|define|show me) (a|the) [{l}] class (for|of) {cthing} [in {l}]
    how (do|can|would) I (write|implement|code|make) {cthing} in {l}
    (implement|write|code|build) {cthing} in {l}
    (implement|write|code) [me] {l} code (to|that can|for) {ctask}
    {l} (function|method|code|class) to {ctask}
    how (do|can|would) I {ctask} in {l}
    (write|give me|show me) (a|some) (python|java|rust|c|c++|go|javascript|haskell|perl|ruby|php|
        kotlin|swift) (program|script|code|function|class|app) (to|that can|for|which can) {task}
    (write|make|build|create) (a|an) (game|app|website|chatbot|web server|compiler|scraper|
        calculator|parser|api|bot|plugin) [in python|in java|in rust|in c|with react|for android]
    (debug|fix|review|optimize|refactor|explain|test) (this|my|the following) (code|function|
        program|script|query|bug)
    (why|how) does (this|my) (code|program|function|script|loop|query) (not work|fail|crash|
        return none|run slowly)
    (what|how) (does|do) (this|the) (error|warning|exception|message) mean
    how (do|can) I (use|install|import|update|configure|debug) (numpy|pandas|django|flask|react|
        node|docker|git|postgres|redis|nginx|kubernetes|webpack|pytorch|tensorflow|vim|excel)
    (write|give me) (a|an) (regex|regular expression|sql query|bash script|unit test|dockerfile|
        makefile|shell command) (for|to|that can) {task}
    (implement|code) (a binary search|quicksort|a linked list|dijkstra|a neural network|a trie|
        a hash map|bubble sort|tetris|snake|a blockchain|an lru cache) [in python|in java|in c|
        in rust|in go]
    what is the (time complexity|big o|runtime) of (quicksort|binary search|merge sort|this loop|
        hashing)
    (difference|what is the difference) between (a list and a tuple|java and javascript|
        sql and nosql|git merge and rebase|tcp and udp|threads and processes|http and https|
        a class and an object)
    (how|where) do I (deploy|host|test|publish|monitor) (a website|an app|my model|a python package|
        a database)
    (convert|translate|port) (this|my) (code|script|program) (to|from) (python|java|rust|c|
        javascript|go)
    (def|class|import|function|const|SELECT|#include|for i in) {noun} {noun2} {few}
    (traceback|error|exception|segmentation fault|syntaxerror|typeerror|
        nullpointerexception): {noun} {noun2} [line {big}]
    my (code|server|build|test|database|docker container|script) (crashes|fails|is slow|
        does not start|hangs)
    (which|what) (programming language|framework|database|library|editor|laptop) (should I|
        is best to) (learn|use|buy|choose)
""")
ADVICE = Phrases("""
    how (do|can|could|should|would) I {task}
    (what is the best way|what's the easiest way|teach me|show me how|I want|I need|help me|
        is it hard|how long does it take) to {task}
    (can|could) you (help me|show me how to|explain how to|tell me how to) {task}
    (should|shall|can|may|must) I {task}
    is it (safe|legal|hard|possible|worth it|healthy|ok|expensive|bad) to {task}
    (is|are) {food} (healthy|good for me|bad for me|fattening|cheap|vegan)
    (is|are) {food} (better|healthier) than {food2}
    (give me|find|what is) a (good|simple|quick|healthy|vegan) recipe (for|with) {food}
    how (many calories|much sugar|much protein|much fat) (is|are) in {food}
    how long (do|should) I (cook|boil|bake|roast|store|fry) {food}
    (recommend|suggest|tell me|name) [me] (some|a few|good|the best|three) {things}
    (which|what) {things} (do you recommend|would you recommend|are good|should I buy|should I read|
        should I try)
    (what are|top ten|best|the best|the top five) {things} (of all time|this year|for beginners|
        in {city}|for kids|)
    what (should|could) I (get|buy|give) my (mother|boyfriend|wife|boss|friend|dad) for (christmas|
        his birthday|her birthday|our anniversary)
    I (have|feel|got) (a pain|pain|a rash|an itch|a fever|a lump) (in|on) my (leg|back|chest|head|
        arm|stomach), what (is it|should I do|can I do)
    (what are|what is) the (symptoms|treatment|cause|cure|side effects) (of|for) {topic}
    what do you think (about|of) {topic}
    (what's|what is) your opinion (on|about) {topic}
    do you (think|believe) [that|in] {topic} [is good|is real|will win|matters]
    who (will|is going to|should) win (the election|the cup|the game|the war|the oscar|tonight)
    (what is|what's) (in the news|the latest news|happening in {country}|the stock price of apple|
        the score|trending|on tv tonight)
    (will|is) {topic} (change|end|matter|become popular|be forgotten|be replaced) (soon|one day|
        in ten years|)
    (predict|forecast) (the future|the weather|the price|the winner|the end) of {topic}
    what is the (meaning|purpose|sense|goal) of (life|existence|everything|suffering)
    (describe|what is in|what do you see in) (this|the|my) (picture|image|photo|video|painting)
    (if|suppose) (all|some|no) {noun}s are {noun2}s, (are|is) (all|some|every) {noun2}s {adj}
    (solve|answer) (this|the following) (riddle|puzzle|problem|question): {sentence}
    (I am|I'm) (writing|planning|working on|studying for) (a|an) {text}, (any ideas|
        where do I start|can you help|give me tips)
    (check|find|search|look up|google) [for] {topic} [online|on the internet|for me|on wikipedia]
    how (will|can|do|did) (humans|people|we|scientists|animals) {verb} {topic}
""")

GROUPS = (
    Group(Kind.QUESTION, FACTS, 4),
    Group(Kind.QUESTION, PLACES, 1.6),
    Group(Kind.ORDER, WRITING, 3),
    Group(Kind.QUESTION, SUMS, 2),
    Group(Kind.QUESTION, PROGRAMS, 3),
    Group(Kind.QUESTION, ADVICE, 3.5),
)
