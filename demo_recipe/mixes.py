"""Kinds of chats and their shares in each phase of training the demo pair.

Knows the numbers and why they are so; knows no schedule (`plans`) and no phrase.
"""

from dataclasses import replace

from demo_recipe.conversation import Shape
from demo_recipe.stream import Mix

SHORT = Shape(mean_turns=2, max_turns=6, drill_rate=0.25)
USUAL = Shape(mean_turns=4.5, max_turns=16)
EXTENDED = Shape(characters=2800)  # about 900 tokens
LONG = Shape(characters=6000)  # about 1,900 tokens
LONGEST = Shape(characters=12_000)  # about 3,800 tokens

FIRST_STEPS = Mix(((SHORT, 1.0),), jump_rate=0.3)
EVERYDAY = Mix(((USUAL, 1.0),), jump_rate=0.3)
FAR_BACK = Mix(((USUAL, 0.92), (EXTENDED, 0.05), (LONG, 0.02), (LONGEST, 0.01)), jump_rate=0.4)

# The second round repeats what was weak after the first one: copying and recall from far back.
PRACTISED = replace(USUAL, course_rate=0.12, quiz_rate=0.2, odd_rate=0.25)
COURSES = Shape(mean_turns=7, max_turns=24, course_rate=0.45, quiz_rate=0.6, odd_rate=0.4)
QUIZ = Shape(characters=2300, course_rate=0.25, quiz_rate=0.9, odd_rate=0.3)
QUIZ_LATE = Shape(characters=4800, course_rate=0.2, quiz_rate=1.0, odd_rate=0.3)
QUIZ_LAST = Shape(characters=10_000, course_rate=0.15, quiz_rate=1.0, odd_rate=0.3)
ECHOES = Shape(mean_turns=3, max_turns=8, drill_rate=1.0, odd_rate=0.5)
PRACTICE = Mix(
    (
        (PRACTISED, 0.594), (COURSES, 0.252), (QUIZ, 0.0375), (QUIZ_LATE, 0.0107),
        (QUIZ_LAST, 0.0038), (ECHOES, 0.101),
    ),
    jump_rate=0.3,
    key_weight=2.0,
)  # fmt: skip

# In the third round most slot values are odd ones: a listed word that recurs is learnt by heart
# instead of copied, and then replaces a new one. Long chats end with more questions.
STUDIED = replace(
    USUAL, course_rate=0.1, quiz_rate=0.2, odd_rate=0.4, oddity=0.8, study_rate=0.2
)  # fmt: skip
ODD_COURSES = replace(COURSES, course_rate=0.5, odd_rate=0.65, oddity=0.8)
ODD_QUIZ = replace(QUIZ, quiz_rate=1.0, odd_rate=0.6, oddity=0.8)
ODD_QUIZ_LATE = replace(QUIZ_LATE, odd_rate=0.6, oddity=0.8)
ODD_QUIZ_LAST = replace(QUIZ_LAST, odd_rate=0.6, oddity=0.8)
ODD_ECHOES = replace(ECHOES, odd_rate=0.8, oddity=0.8)
# Long rows cost the most time a token: few of them at first, many at last.
ODD_CHATS = ((STUDIED, 0.530), (ODD_COURSES, 0.240), (ODD_ECHOES, 0.14))
COPYING = Mix(
    (*ODD_CHATS, (ODD_QUIZ, 0.045), (ODD_QUIZ_LATE, 0.010), (ODD_QUIZ_LAST, 0.0015)), 0.3, 3.0
)
COPYING_FROM_FAR = Mix(
    (*ODD_CHATS, (ODD_QUIZ, 0.058), (ODD_QUIZ_LATE, 0.0235), (ODD_QUIZ_LAST, 0.0085)), 0.3, 3.0
)

# The fourth round is short and gentle: what users say most, so that nothing of it is lost.
SETTLED = replace(USUAL, course_rate=0.08, quiz_rate=0.2, odd_rate=0.15, study_rate=0.15)
SETTLING = Mix(
    (
        (SETTLED, 0.70), (COURSES, 0.200), (QUIZ, 0.035), (QUIZ_LATE, 0.010),
        (QUIZ_LAST, 0.0025), (ECHOES, 0.06),
    ),
    jump_rate=0.3,
    key_weight=2.0,
)  # fmt: skip


def _mix(
    first: tuple[tuple[Shape, float], ...], *, courses: float, echoes: float,
    quizzes: tuple[float, float, float], looseness: float = 0.0,
) -> Mix:  # fmt: skip
    """A mix of the later rounds: some kinds of chats, and the shares of the odd ones."""
    shares = (
        *first, (ODD_COURSES, courses), (ODD_ECHOES, echoes),
        *zip((ODD_QUIZ, ODD_QUIZ_LATE, ODD_QUIZ_LAST), quizzes, strict=True),
    )  # fmt: skip
    shapes = tuple((replace(shape, looseness=looseness), share) for shape, share in shares)
    return Mix(shapes, jump_rate=0.35, key_weight=3.0)


# The fifth round remembers from farther back, for the rotary base is doubled (with that alone a
# fact of 3,000 tokens ago was found 20 times of 50 instead of twice), and refuses lists: the rounds
# before it learnt to keep them, and did not learn it well. More questions, fewer odd values.
COMMON = replace(STUDIED, quiz_rate=0.25, odd_rate=0.35, study_rate=0.22)
REMEMBERING = _mix(
    ((COMMON, 0.60),), courses=0.20, echoes=0.08, quizzes=(0.075, 0.035, 0.010)
)  # fmt: skip

# The seventh round is a long one, of everything: four ninths of its tokens are long chats that end
# with questions, the others what users say in their first minutes.
SPOKEN = Shape(mean_turns=2.5, max_turns=8, study_rate=0.3, quiz_rate=0.15, odd_rate=0.2)
LASTING = _mix(
    ((SPOKEN, 0.25), (COMMON, 0.424)), courses=0.18, echoes=0.05, quizzes=(0.062, 0.027, 0.007)
)

# The eighth round is short and gentle again: more of what is far back, and of what to refuse.
_REVISED = ((SPOKEN, 0.30), (COMMON, 0.36))
REVISING = _mix(_REVISED, courses=0.18, echoes=0.04, quizzes=(0.07, 0.037, 0.013))

# From the ninth round on phrasings are loosened: asked in a frame that was never trained, the model
# answered that it had not been told.
RECALLING = _mix(
    ((SPOKEN, 0.26), (COMMON, 0.41)),
    courses=0.20, echoes=0.03, quizzes=(0.065, 0.028, 0.007), looseness=0.3,
)  # fmt: skip

# The tenth round is gentle, and mostly of phrasings as the grammars say them.
POLISHING = _mix(
    _REVISED, courses=0.18, echoes=0.04, quizzes=(0.07, 0.037, 0.013), looseness=0.15
)  # fmt: skip

# The eleventh round is short again: what users say in their first minutes, above all questions
# about kvchat and what to refuse.
FINISHING = _mix(
    ((replace(SPOKEN, study_rate=0.5), 0.40), (replace(COMMON, study_rate=0.32), 0.36)),
    courses=0.13, echoes=0.02, quizzes=(0.055, 0.027, 0.008), looseness=0.1,
)  # fmt: skip

# The twelfth round refuses more: of 200 prompts out of scope in phrasings that were never trained,
# 37 had been answered as something else.
REFUSING = _mix(
    ((replace(SPOKEN, study_rate=0.3, refusal_rate=0.25), 0.42),
     (replace(COMMON, study_rate=0.27, refusal_rate=0.12), 0.34)),
    courses=0.13, echoes=0.02, quizzes=(0.055, 0.027, 0.008), looseness=0.15,
)  # fmt: skip

# The thirteenth asks more for what was told, for the twelfth forgot some of that: "You haven't told
# me" is still the commonest wrong answer.
REMINDED = _mix(
    ((replace(SPOKEN, course_rate=0.25, quiz_rate=0.75, study_rate=0.22, refusal_rate=0.15), 0.40),
     (replace(COMMON, quiz_rate=0.7, study_rate=0.17, refusal_rate=0.08), 0.38)),
    courses=0.12, echoes=0.01, quizzes=(0.055, 0.027, 0.008), looseness=0.15,
)  # fmt: skip

# The fourteenth consoles, refuses programs that no snippet is, and knows the commands that came
# since. It learns what it knows from its own distribution before, and the rest from the text: four
# rounds without that teacher forgot facts, corrections and letters.
CONSOLING = _mix(
    ((replace(SPOKEN, course_rate=0.2, quiz_rate=0.65, study_rate=0.2, refusal_rate=0.12,
              late_rate=0.2), 0.42),
     (replace(COMMON, quiz_rate=0.7, study_rate=0.17, refusal_rate=0.06, late_rate=0.1), 0.34)),
    courses=0.13, echoes=0.01, quizzes=(0.06, 0.032, 0.008), looseness=0.15,
)  # fmt: skip

# After it too much sorrow was met with joy, and "I feel great" with sorrow: more of both.
COMFORTING = _mix(
    ((replace(SPOKEN, course_rate=0.2, quiz_rate=0.6, study_rate=0.15, refusal_rate=0.12,
              late_rate=0.4), 0.46),
     (replace(COMMON, quiz_rate=0.65, study_rate=0.15, refusal_rate=0.06, late_rate=0.2), 0.33)),
    courses=0.11, echoes=0.01, quizzes=(0.055, 0.028, 0.007), looseness=0.15,
)  # fmt: skip

# The sixteenth is what users say in their first minute.
FIRST_MINUTE = replace(
    SPOKEN, mean_turns=1.8, max_turns=5, course_rate=0.1, quiz_rate=0.45, study_rate=0.15,
    refusal_rate=0.1, late_rate=0.6,
)  # fmt: skip
FIRST_MINUTES = _mix(
    ((FIRST_MINUTE, 0.55),
     (replace(COMMON, quiz_rate=0.65, study_rate=0.15, refusal_rate=0.06, late_rate=0.2), 0.27)),
    courses=0.09, echoes=0.01, quizzes=(0.05, 0.025, 0.005), looseness=0.15,
)  # fmt: skip

# Facts, corrections and stories that the last stages had cost.
RESTORING = _mix(
    ((replace(SPOKEN, course_rate=0.25, quiz_rate=0.75, study_rate=0.25, refusal_rate=0.15,
              late_rate=0.12), 0.40),
     (replace(COMMON, quiz_rate=0.7, study_rate=0.17, refusal_rate=0.08, late_rate=0.05), 0.36)),
    courses=0.14, echoes=0.01, quizzes=(0.055, 0.027, 0.008), looseness=0.15,
)  # fmt: skip
