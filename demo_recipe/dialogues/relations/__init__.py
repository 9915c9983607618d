"""Everything a user can tell in the demo dialogues, with weights. Knows no chat."""

from demo_recipe.dialogues.relations.acquaintances import (
    PERSON_ATTRIBUTE,
    PERSON_BIRTHDAY,
    PERSON_TASTE,
)
from demo_recipe.dialogues.relations.belongings import APPOINTMENT, FAVOURITE, WHEREABOUTS
from demo_recipe.dialogues.relations.life import ALLERGY, CAR, LANGUAGE, MUSIC, PET, TRIP
from demo_recipe.dialogues.relations.people import (
    PERSON_AGE,
    PERSON_HOME,
    PERSON_JOB,
    PERSON_NAME,
    PERSON_ORIGIN,
)
from demo_recipe.dialogues.relations.self import AGE, BIRTHDAY, CHILDREN, HOME, JOB, NAME, ORIGIN
from demo_recipe.dialogues.relations.taste import DISTASTE, HOBBY, SPORT, STUDY, TASTE
from demo_recipe.dialogues.relations.things import ATTRIBUTE, NOTE
from demo_recipe.facts import Relation

WEIGHTED: tuple[tuple[Relation, float], ...] = (
    (NAME, 8), (HOME, 3), (ORIGIN, 1.5), (JOB, 3), (AGE, 2.5), (CHILDREN, 1), (BIRTHDAY, 1.5),
    (ALLERGY, 1.5), (PET, 5), (TRIP, 3), (CAR, 1), (MUSIC, 1), (LANGUAGE, 1), (STUDY, 1),
    (HOBBY, 1.5), (SPORT, 1), (TASTE, 1.5), (DISTASTE, 1), (ATTRIBUTE, 9), (NOTE, 4),
    (FAVOURITE, 6), (WHEREABOUTS, 2.5), (APPOINTMENT, 2.5), (PERSON_NAME, 3.5), (PERSON_HOME, 2),
    (PERSON_JOB, 2), (PERSON_AGE, 1.5), (PERSON_ORIGIN, 1), (PERSON_TASTE, 1.5),
    (PERSON_ATTRIBUTE, 3), (PERSON_BIRTHDAY, 1.5),
)  # fmt: skip
