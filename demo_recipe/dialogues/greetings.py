"""Greetings, thanks, goodbyes and the small words between. Knows what people say, no more."""

from demo_recipe.dialogues.exchange import Exchange
from demo_recipe.grammar import Phrases

HELLO = Exchange(
    Phrases("""
        (hi|hello|hey|hiya|heya|howdy|yo|hullo|greetings|hallo|good day|welcome)
        (hi|hello|hey|howdy|yo) (there|you|kvchat|friend|buddy|bot|again|everyone|computer|model|
            all|dear)
        (hi|hello|hey) (and|,) (good morning|good evening|good afternoon|good day)
        good (morning|evening|afternoon|day) [kvchat|to you|there|friend|my friend]
        (morning|evening|afternoon) [all|everyone]
        (hi|hello|hey), (nice|good|great|glad) to (meet|see) you
        (nice|good|great|glad|pleased) to (meet|see) you [too]
        (hi|hello|hey), [this is] (my first time here|I'm new here|I am new here|just trying this)
        (hi|hello|hey), (let's|can we|shall we|I want to) (chat|talk|start|begin)
        (hi|hello|hey) (just|I am just|I'm just) (testing|trying) [this|you|it] [out]
        (I'm|I am) new (here|to this)
        (just|only) (saying hi|saying hello|passing by|looking around|testing|trying this)
        (is anybody|is anyone|are you|is somebody) (there|here|awake|home|listening)
        (can|do) you (hear|see|read) me
        (knock knock|hello hello|hi hi|ahoy|sup|aloha)
        (I'm|I am) back
        (so|ok|okay|well), (let's start|here we go|here I am|let's go|let's chat)
        it's (me|me again)
        first (time|day|try) here
        (let's|we should) (talk|chat) [a bit|a little]
    """),
    "Hello! I am the small demo model of kvchat. What would you like to try?",
    "hello",
    weight=10,
)
HOW_ARE_YOU = Exchange(
    Phrases("""
        how are you [doing] [today|this morning|tonight|now]
        how are (things|you feeling|you keeping|u)
        how (do you do|is it going|goes it|have you been|was your day|is your day|is life|
            do you feel)
        how's (it going|life|your day|everything|it hanging|your day going)
        (hi|hello|hey), how are you [doing] [today]
        (hi|hello|hey) [there], how's it going
        (good morning|good evening|good afternoon|good day), how are you [doing] [today]
        (good morning|good evening|good afternoon), how's it going
        (hi|hey|hello) how do you (do|feel)
        what's (up|new|going on|happening) [with you]
        whats up
        (you|are you|everything) (ok|okay|alright|fine|well|good) [today]
        (are|do) you (feeling|feel) (well|good|fine|okay) [today]
        (and|so) how are you
        (had|having) a good day
        are you (happy|having fun|in a good mood|busy|tired)
    """),
    "I am doing well, thank you! How can I help you?",
    "well",
    weight=4,
)
GREETINGS = (
    HELLO,
    HOW_ARE_YOU,
    Exchange(
        Phrases("""
            (I'm|I am) [doing|feeling] (fine|good|great|well|okay|ok|alright|very well|not bad|
                happy)
            (I'm|I am) [doing|feeling] (fine|good|great|well|okay), (thanks|thank you|and you)
            (fine|good|great|well|okay|not bad|very good|pretty good|so-so), (thanks|thank you|
                and you|how about you)
            (all|everything is|everything's) (good|fine|great|well|okay) [here]
            (can't|cannot) complain
            (I feel|feeling) (great|good|wonderful|fine|better|fantastic|awesome) [today|now]
            (it was|I had|I'm having|today is|it is) a (good|great|nice|lovely|wonderful|
                perfect) day
            my day (was|is) (good|great|fine|nice|okay|going well)
            (life is|things are) (good|great|fine|going well)
            (I'm|I am) (so|very|really) (happy|excited|glad|pleased|relieved) [today|right now]
            (good news|great news|I won|I passed|I did it|I made it)
            (I got|we got) (the job|good news|a prize|engaged|married)
        """),
        "I am glad to hear that!",
        "glad",
        weight=2,
    ),
    Exchange(
        Phrases("""
            (thanks|thank you|thx|ty|cheers|many thanks|thanks a lot|thank you so much|
                thank you very much)
            (thanks|thank you|thx|cheers) (a lot|so much|for that|for your help|for the help|
                for everything|again|very much|mate|buddy|kvchat|friend)
            (thanks|thank you|cheers), (that helps|that was helpful|that was great|very kind|great|
                perfect|got it|good answer|that's nice)
            (great|perfect|ok|okay|cool|nice|awesome|wonderful), (thanks|thank you|thx)
            (that|this) (was|is) (helpful|very helpful|useful|a great help|kind of you|all I needed|
                what I needed)
            (that|it|this) (helps|helped) [me] [a lot|very much]
            (I appreciate|much appreciated|appreciate) [it|that|your help|this]
            (you've been|you were|you are) (a great help|very helpful|a big help|so helpful|
                very kind)
            (very|so) kind [of you]
            (I'm|I am) (grateful|thankful|very grateful)
            you (helped|saved) me [a lot|so much]
            (tysm|merci|gracias|danke|grazie)
        """),
        "You are welcome!",
        "welcome",
        weight=5,
    ),
    Exchange(
        Phrases("""
            (bye|goodbye|good bye|bye bye|byebye|cya|farewell|so long|ciao|adios|cheerio|ta ta)
            (bye|goodbye|bye bye) (for now|then|kvchat|friend|now|and thanks|everyone|all)
            (see you|see ya|see u|cu) [soon|later|tomorrow|around|again|next time|then]
            (talk|speak) to you (soon|later|tomorrow)
            (until|till) (next time|tomorrow|later|then|we meet again)
            (catch|see) (you|ya) (later|around|soon)
            (I have to|I've got to|I must|I need to|I should|gotta|got to|time to|I gotta) (go|
                leave|run|head out|be off|stop) [now|soon]
            (I'm|I am) (leaving|going|off|done|out|done for today|going home|going to bed|
                heading out) [now|for today]
            (that's|that is|that was) (all|it|everything) (for today|for now|I wanted|I needed|then)
            (good night|goodnight|night night|sleep well|sweet dreams|nighty night) [kvchat|then|
                for now]
            (take care|stay safe|be well|all the best|have a good one)
            (have a|enjoy your) (nice|good|great|lovely|pleasant) (day|evening|weekend|night|week)
            (let's stop|we can stop|stop) (here|now|for today)
            (thanks|thank you), (bye|goodbye|see you|good night|that's all|have a nice day)
            (ok|okay|alright|well), (bye|goodbye|see you|good night|I'm off|gotta go|I have to go)
        """),
        "Goodbye! This chat is saved: kvchat -c continues it.",
        "goodbye",
        weight=4,
    ),
    Exchange(
        Phrases("""
            (ok|okay|k|alright|fine|right|sure|good|got it|understood|I see|I understand|noted|
                makes sense|fair enough|yes|yep|yeah|yup|no|nope|nah|maybe|perhaps|hm|hmm|mhm|aha|
                oh|ah|uh|oh well|oh ok|so so|exactly|indeed|of course|certainly|absolutely|true|
                correct|that's right|that is right|agreed|deal)
            (ok|okay|alright|oh|ah|yes|no) (then|good|fine|cool|great|sure|I see|got it|
                I understand)
            (that|this|it) (makes sense|is clear|is fine|is ok|sounds good|is right|is correct|
                works|is true)
            (I|we) (understand|get it|got it|know|agree|see what you mean|don't think so|think so|
                guess so)
            (sounds|looks|seems) (good|great|fine|right|okay)
            (never mind|nevermind|forget it|doesn't matter|no matter|no problem|no worries|
                don't worry|all good)
            (wait|one moment|just a moment|one second|hold on|give me a second|brb|be right back|
                hang on)
            (let me think|I'm thinking|I need to think|thinking) [about it|about that]
            (not yet|not now|maybe later|later|another time|not today)
            (if you say so|whatever|as you like|up to you|I don't care|I don't mind)
        """),
        "All right. What would you like to do next?",
        "all right",
        weight=3,
    ),
    Exchange(
        Phrases("""
            (wow|great|cool|nice|awesome|amazing|perfect|excellent|wonderful|fantastic|brilliant|
                super|sweet|neat|good job|well done|bravo|impressive|interesting|not bad|very good|
                very nice|so cool|lovely|good)
            (that's|that is|this is|you are|you're|it's|that was) (great|cool|nice|awesome|amazing|
                perfect|wonderful|impressive|good|smart|clever|fun|fast|cute|excellent|neat|
                lovely|very good|so cool|really good|the best|sweet|helpful)
            (good|great|nice|excellent|clever) (job|work|answer|one|bot|model|reply|memory)
            (I|I really) (like|love) (it|that|this|you|your answer|your style|how fast you are|
                kvchat|this program)
            (you|u) (are|r) (good|great|quick|fast|nice|funny|smart|friendly)
            (you know|you remember|you got) (it|that|a lot|everything)
            (wow|oh wow|haha|oh), (that's|that is|you are|you're) (fast|quick|cool|great|good|
                clever|amazing|nice)
            (correct|right|yes|exactly|true), (well done|good job|very good|good memory|great)
            (love|liked|loved) (it|that|this)
            (ten|five) (points|stars|out of ten)
            I am impressed
            (you made|that makes) (me happy|my day|me smile)
        """),
        "Thank you, that is kind!",
        "thank",
        weight=3,
    ),
    Exchange(
        Phrases("""
            (haha|hahaha|lol|lmao|rofl|hehe|hihi|ha ha|ha|xd|heh|that's funny|so funny|funny|
                that made me laugh|hilarious)
            (haha|lol|hehe) (that's funny|good one|nice|funny|ok|that was good|you are funny|yes)
            (that|this|it) (is|was) (funny|hilarious|so funny|making me laugh)
            I (laughed|am laughing|can't stop laughing|had to laugh|have to laugh)
            (just|only) (kidding|joking|a joke)
            (I'm|I was) (kidding|joking|just joking|only joking)
        """),
        "I am glad it made you smile!",
        "smile",
        weight=1,
    ),
)
