"""Lines of system prompts that are known to change from one session, day or directory to the next.

Agents write them near the top, so that all behind them would be new to the cache: the rest of the
prompt, and the tools, which most templates write behind the system prompt.
"""

import re

# Claude Code's line for the billing of Anthropic's own servers, which do not show it to a model
# either. Its numbers are others in every session. The text of the next block may follow directly.
_BILLING = re.compile(
    r"^x-anthropic-billing-header:(?:[ \t]*\w+=[^;\n]*;)*(?:[ \t]*\w+=[^;\s]*(?=\n|\Z))?[ \t]*\n?",
    re.M,
)
_DATE = (
    r"(?:(?:the )?(?:current|today'?s|today’s|local|system) )*(?:date|time|datetime)"
    r"(?: ?(?:and|&|/) ?time)?|timestamp|today|now"
)
_PLACE = (
    r"(?:the |current |primary |initial |your )*working (?:directory|dir|folder)|cwd|pwd"
    r"|(?:the )?current (?:workspace |project )?(?:directory|dir|folder|workspace|project)"
    r"|(?:the )?(?:workspace|project|repository|repo)(?: base| root)?(?: path| folder| directory)?"
    r"|(?:i'm |i am |you are )?currently working in (?:the )?directory"
)
_IS_REPOSITORY = r"(?:is )?(?:(?:the )?(?:working )?directory )?(?:in )?(?:a )?git repo(?:sitory)?"
_NAME = r"(?:current |git )+branch|(?:session|request|conversation)[ _-]?id"
_ITEM = r"[ \t]*(?:[-*•][ \t]+)?(?:\*\*|`)?"
_IS = r"(?:\*\*|`)?(?:[ \t]*[:=]| is(?: now)?:?)(?:\*\*)?[ \t]*"
_QUOTE = "[`'\"]?"
# What stands behind a label has to look like such a value: "Today: be nice" is a rule.
_LABELLED = re.compile(
    rf"{_ITEM}(?:(?:{_DATE}){_IS}(?=.*\d).{{1,60}}"
    rf"|(?:{_PLACE}){_IS}{_QUOTE}(?:[/~\\]|\.$|[a-z]:\\).*"
    rf"|(?:{_IS_REPOSITORY}){_IS}(?:yes|no|true|false)\b.*"
    rf"|(?:{_NAME}){_IS}\S+)[ \t]*",
    re.I,
)
_ELEMENT = re.compile(
    r"[ \t]*<((?:current[_-]?|today[_-]?)?(?:date|time|datetime|cwd|working[_-]?directory|branch))>"
    r".*</\1>[ \t]*",
    re.I,
)
# A value this long is no date and no directory.
_MOST_CHARACTERS = 300


def without_billing(system: str) -> tuple[str, list[str]]:
    """Return a system prompt without lines for the billing of other servers, and those lines."""
    lines = [match[0].strip() for match in _BILLING.finditer(system)]
    return (_BILLING.sub("", system), lines) if lines else (system, [])


def is_volatile(line: str) -> bool:
    """Return whether a line says the date, the time, a directory or a number of the session."""
    if len(line) > _MOST_CHARACTERS:
        return False
    return any(form.fullmatch(line) for form in (_LABELLED, _ELEMENT))
