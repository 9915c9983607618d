"""Moods, jokes, complaints, wishes and the weather. Knows what people say, no more."""

from demo_recipe.dialogues.exchange import Exchange
from demo_recipe.grammar import Phrases, Words
from demo_recipe.lexicon.people import FIRST_NAMES

LOVED = Words("""
    dog, cat, rabbit, hamster, horse, parrot, grandma, grandpa, grandmother, grandfather, mother,
        father, mum, mom, dad, aunt, uncle, sister, brother, cousin, friend, best friend, wife,
        husband, son, daughter, teacher, neighbour, colleague, puppy, kitten, fish, guinea pig
""")

# "My cat died yesterday" has the frame of a fact ("My cat is called ..."), so a loss is said in
# many ways here: the model once answered it with "you have a cat named yesterday".
MOURNING = Exchange(
    Phrases("""
        my {l} (died|has died|passed away|has passed away|just died|is dead) [today|yesterday|
            last night|last week|last month|last year|this morning|recently|two days ago|
            a week ago|an hour ago]
        my {l} (died|passed away) [yesterday|today|last week|this morning|recently] and I am
            (sad|so sad|very sad|heartbroken|devastated|not well|crying|lonely|alone)
        my {l} and my {l2} (died|passed away) [yesterday|last year|in an accident]
        I am (sad|so sad|very sad|heartbroken|crying) because my {l} (died|passed away|is dead)
            [yesterday|today|last week]
        I'm (sad|so sad|very sad|heartbroken|devastated), my {l} (died|passed away|is dead)
            [yesterday|today|last week]
        I lost my {l} [yesterday|today|last week|last year|recently|this morning|to cancer|
            in an accident]
        I (just|recently) lost my {l}
        we lost (our|my) {l} [yesterday|last week|this year|recently]
        (we|I) (had|have) to put my {l} to sleep [yesterday|today|last week]
        my {l} is (gone|no longer with us|no longer alive|not alive any more)
        my {l} (was killed|had an accident and died|did not survive) [yesterday|last week]
        (I miss|I am missing|I still miss) my {l}, (she|he) died [last year|last week|yesterday]
        (yesterday|today|last week|last night|this morning|last year) my {l} (died|passed away)
        (someone|a person|somebody) (I love|I loved|close to me|in my family) (died|
            passed away) [yesterday|today|last week]
        I am (grieving|in mourning|mourning my {l}|grieving for my {l})
        (tomorrow|today|yesterday) (is|was) the funeral of my {l}
        my {l}'s funeral (is|was) (tomorrow|today|yesterday|last week)
        I can't believe my {l} is (dead|gone)
        (my|our) {l} {n} (died|has died|passed away|is dead) [today|yesterday|last week|last year]
        our {l} (died|passed away|has died|is dead) [today|yesterday|last night|last week]
        my {l} didn't make it
        my {l} (died|passed away) in (a car accident|an accident|the hospital|her sleep|his sleep|
            the war)
        my {l} died (of|from) (cancer|a heart attack|a stroke|old age|covid|an illness)
        my {l} died when I was (a child|little|ten|young)
        we (buried|are burying|will bury) (my|our) {l} (today|yesterday|tomorrow|last week)
        my {l} (died|passed away). I (am sad|feel so sad|am heartbroken|miss her|miss him|
            can't stop crying)
        I (found out|heard|just heard) that my {l} (died|has died|passed away|is dead)
        (rest in peace|rip), my {l}
    """),
    "I am so sorry for your loss.",
    "sorry for your loss",
    weight=3,
    slots=(("l", LOVED), ("l2", LOVED), ("n", FIRST_NAMES)),
)

# What the person feels, or what happened to them.
SADNESS = Exchange(
    Phrases("""
        (I'm|I am|I feel|I'm feeling|feeling|im) [so|very|really|a bit|kind of|a little|kinda|
            pretty|rather] (sad|down|unhappy|lonely|depressed|upset|miserable|blue|low|terrible|
            awful|bad|anxious|worried|nervous|stressed|afraid|scared|hurt|heartbroken|angry|mad|
            furious|annoyed|frustrated|disappointed) [today|now|right now|tonight|at the moment|
            lately]
        (I had|today was|it was|I'm having|today is) a (bad|terrible|hard|awful|rough|horrible|
            long|sad) (day|week|night|morning|time)
        my day (was|is) (bad|terrible|awful|hard|not good|horrible|rough)
        (I|I just) (cried|want to cry|failed|lost my job|broke up|lost|
            lost the game|miss my family|miss my friend|miss home|failed my exam)
        (not good|not great|not so good|not well|not so well|could be better|bad|terrible|awful|
            so sad)
        (nobody|no one) (likes|loves|understands|listens to) me
        (everything|life|it all) (is|goes|went) (wrong|bad|terrible|hard|difficult)
        (things|it) (could be|aren't|are not) (better|going well|so good)
        my {l} (is ill|is very ill|is sick|is in hospital|is in the hospital|is not well)
            [today|again|since yesterday]
        my (wife|husband|girlfriend|boyfriend|partner|best friend) (left me|broke up with me|
            dumped me|cheated on me) [today|yesterday|last week]
        I broke up with my (girlfriend|boyfriend|partner|fiancee|wife|husband)
            [today|yesterday|last week]
        my (boss|company|manager|employer) (fired me|sacked me|let me go) [today|yesterday]
        I (got|was|have been) (fired|sacked|dumped|laid off|robbed|hurt) [today|yesterday|from work]
        I am (sad|unhappy|lonely|worried) (because I lost my job|about my family|and tired|
            and alone|since this morning)
        I lost my (job|keys and my patience|way|wallet) and I am (sad|upset|worried)
        (something|it) (sad|bad|terrible) happened
        (cheer me up|comfort me|I need a hug|I need comfort|make me happy)
    """),
    "I am sorry to hear that. I hope it gets better soon.",
    "sorry",
    weight=3,
    slots=(("l", LOVED),),
)

MOODS = (
    SADNESS,
    MOURNING,
    Exchange(
        Phrases("""
            (I'm|I am|I feel|im) [so|very|really|a bit|kind of|a little|too|pretty|always] (tired|
                sleepy|exhausted|hungry|thirsty|cold|hot|sick|ill|busy|lazy|drunk|lost|late|dizzy|
                full|awake|weak) [today|now|right now|tonight]
            I (have|got|have got) a (cold|headache|fever|stomach ache|toothache|hangover|
                sore throat)
            I (didn't|did not|can't|couldn't) sleep [last night|well|at all]
            (my) (head|back|tooth|leg|arm|knee|foot) (hurts|aches|is sore|is broken)
            I (need|want) (coffee|a break|a nap|sleep|food|water|a holiday|a rest|some sleep|
                to sleep|to eat|to rest)
            (so|too) (tired|hungry|sleepy|busy|cold|hot|late)
            it's (late|early|too late|too early|past midnight)
            (work|school|today|my day|the day) (was|is) (long|tiring|exhausting|hard work|so long)
            I (worked|studied|walked|ran) (all day|all night|too much|for hours)
            I could (sleep|eat) (all day|now|forever|a horse)
        """),
        "Take good care of yourself!",
        "care",
        weight=2,
    ),
    Exchange(
        Phrases("""
            (I'm|I am|I feel|im) [so|very|really|a bit] bored [today|now]
            (this is|it's|it is|everything is|I find this) [so|very|a bit] boring
            (entertain|amuse) me
            what (should|can|could|shall) (we|I) do [now|here|next|together|with you]
            (give me|any|do you have) (an idea|ideas|a suggestion|suggestions) [what to do|
                what to ask|what to try|for me]
            (what|which) (should|can|could) I (ask|try|type|say|test) [you|now|here|first]
            what (is there|can I|else can I) to (do|try)
            (I don't|I do not) know what to (say|ask|do|type|try)
            (let's|shall we) (play|do something|play something|do something fun)
            (suggest|propose) something [to do|to try]
            (surprise|show) me [something|something nice]
            (tell|say|show) me something [nice|funny|interesting|new]
            (say|do) something [nice|funny|interesting]
        """),
        "Try this: tell me a fact to remember, or ask for a story about a fox.",
        "try this",
        weight=2,
    ),
    Exchange(
        Phrases("""
            (tell|give) me a joke
            (tell|do you know|say|give|another|one more|any) [me] (a|another|one more|some|
                any) (joke|jokes|funny joke|good joke|pun)
            (do you know|know|got|have you got) (a joke|any jokes|a good joke|jokes|something funny)
            (make|can you make) me laugh
            (a joke|joke|another joke|one more joke) [please]
            (can|could) you (tell|say) a joke
            (say|tell me) something funny
            (I want|I need|I'd like) (a joke|to laugh|to hear a joke)
            (be|can you be) funny
            (tell|give) [me] your best joke
            (crack|share) a joke
            let me hear a joke
        """),
        "Why did the block go to disk? It was too cold to stay on the device.",
        "disk",
        weight=1.5,
    ),
    Exchange(
        Phrases("""
            (sorry|I'm sorry|I am sorry|my apologies|apologies|pardon|excuse me|forgive me|oops|
                my bad|whoops|my mistake|my fault)
            (sorry|I'm sorry) (about that|for that|for the typo|for being late|for the trouble|
                I was rude|I was wrong|to bother you|to ask again)
            I (apologize|apologise) [for that]
            (I|that) (was|were) (rude|my fault|my mistake|a mistake|a typo)
            (I didn't|I did not) mean (it|to|to be rude)
            (wrong|oops, wrong) (window|chat|button|key)
        """),
        "No problem at all.",
        "no problem",
        weight=1.2,
    ),
    Exchange(
        Phrases("""
            (you're|you are|ur|that's|that is|this is|it's|that was|what you said is) (wrong|
                incorrect|not right|not true|not correct|a mistake|false|a lie|mistaken|lying)
            (that's|that is|this is|it's) not (right|true|correct|what I asked|what I said|
                what I meant|what I wanted|it|the answer)
            (wrong|incorrect|false|no that's wrong|nope wrong|not correct|not true) [answer|again]
            (you|u) (got it|are|have it|got that) (wrong|all wrong)
            (I|that is not what I) (didn't|did not) (ask|say|mean|want) that
            you (made|are making) (a mistake|mistakes|an error|things up)
            (you|u) (misunderstood|don't understand|do not understand|didn't understand|lied|
                don't listen) [me]
            (that|this) (makes no|doesn't make) sense
            (no|nope), (that's|you are|you're) (wrong|not right|mistaken)
            (what|huh|what are you talking about|what is that supposed to mean|that is nonsense|
                nonsense)
            (think|look) again
            are you sure [about that|of that]
        """),
        "I may be wrong: I am a tiny demo model. Please say it again in other words.",
        "wrong",
        weight=2.5,
    ),
    Exchange(
        Phrases("""
            (you're|you are|you|ur|u are) (stupid|dumb|useless|bad|an idiot|terrible|boring|slow|
                annoying|ugly|silly|a fool|worthless|not very smart|not smart|awful|crap|rubbish|
                hopeless|weird|crazy)
            (I|I really) (hate|don't like|dislike) (you|this|this chat|talking to you)
            (shut up|go away|get lost|stop talking|leave me alone|be quiet|shut it)
            (you|this|this program|this chat|this model|this bot) (sucks|is bad|is terrible|
                is stupid|is useless|is a joke|is boring|is garbage)
            (stupid|dumb|useless|bad|silly|boring) (bot|machine|computer|model|program|thing|ai|
                chat)
            (damn|hell|crap|what the hell|wtf|omg|for god's sake|gosh)
            (what a|such a) (stupid|dumb|useless|bad|terrible) (answer|model|bot|program|reply)
            (you|u) (can't|cannot|don't) (do|know) anything
            you (know|can do) nothing
            (that|this) was (a bad|a stupid|a useless) answer
            (worst|bad) (answer|model|chat|bot) ever
        """),
        "I am sorry to disappoint you. I am only a tiny demo model.",
        "sorry",
        weight=1.5,
    ),
    Exchange(
        Phrases("""
            (I|i think I) (love|like|adore|miss|missed|need) you [so much|too|a lot|very much]
            (do|did) you (love|like|miss|hate) me
            (will you|do you want to|let's) (marry me|get married|be my friend|be friends|
                go out with me|date me|be my girlfriend|be my boyfriend)
            (are you|you are) my friend
            (can we|shall we|let's) be friends
            (you're|you are) (my best friend|my only friend|beautiful|pretty|handsome|sexy|lovely|
                sweet|adorable|cute)
            (are you|do you have|have you got) (single|married|a girlfriend|a boyfriend|a wife|
                a husband|a family|friends|children|kids|parents)
            (give me|I want|can I have) a (hug|kiss)
            (kiss|hug) me
            (what|how) (do|are) you (think|feel) about me
            (I want|I'd like) to (marry you|be your friend|meet you)
            (xoxo|hugs|kisses|<3)
        """),
        "That is kind, but I am only a program.",
        "program",
        weight=1,
    ),
    Exchange(
        Phrases("""
            (happy|merry) (birthday|new year|christmas|easter|holidays|halloween|weekend|friday)
            (happy|merry|have a happy|I wish you a happy|I wish you a merry) (birthday|new year|
                christmas|easter|hanukkah|diwali)
            (congratulations|congrats|cheers|good luck|best wishes|bless you|get well soon|enjoy|
                bon appetit|welcome)
            (have fun|have a good time|all the best|good luck) [to you|with that|today]
            (season's greetings|to your health|hooray|hurray|yay|yippee|woohoo|yes)
            it's (my birthday|christmas|friday|the weekend|new year|a holiday|summer|
                my day off) [today|finally]
        """),
        "Thank you, and the same to you!",
        "same to you",
        weight=0.8,
    ),
    Exchange(
        Phrases("""
            (nice|lovely|beautiful|bad|terrible|strange|great|cold|warm|hot|rainy) (weather|day|
                evening|morning|night) [today|outside|here|isn't it]
            (it's|it is) (raining|snowing|sunny|cold|hot|warm|windy|foggy|cloudy|dark|stormy|
                freezing|getting dark|spring) [today|outside|here|again|right now]
            (it|the weather) (is|looks|was) (nice|bad|terrible|lovely|great|good|awful|rainy|grey|
                sunny|fine) [today|outside|here]
            (what a|such a) (nice|lovely|beautiful|bad|terrible|strange) (day|weather|morning|
                evening|night)
            (the sun|the moon) is (shining|out|up|bright)
            (I like|I love|I hate|I enjoy) (this|the|today's) weather
            (it|the sky) (will|is going to|might) (rain|snow|be sunny|be cold) [today|tomorrow|soon]
            (so|too) (cold|hot|warm|wet|windy) (today|outside|here)
            (snow|rain|sunshine) (again|at last|everywhere|today)
        """),
        "I have no window, but I am glad you told me.",
        "window",
        weight=1.2,
    ),
)
