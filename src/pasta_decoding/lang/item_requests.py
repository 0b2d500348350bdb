"""How many items of a list a prompt asks for, as in "three bullet points" or "at least 5 tips".

Only sure cases count: a number in a request for a list. "I have three cats" asks for nothing.
"""

import math
import re

# fmt: off
_NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
            "twelve", "thirteen", "fourteen", "fifteen"]
# fmt: on
_NUMBER = rf"(?:{'|'.join(_NUMBERS)}|[1-9]|[12]\d)\b"

_REQUEST = (
    r"\b(?:(?:list|give|name|suggest|recommend|rank|tell|propose)(?: me| us)?|show (?:me|us))"
    r"(?: your| the)? |\blist (?:of|with) |\btop "
)
# These ask for a list only in a prompt that speaks of one.
_MILD_REQUEST = r"^|(?<=[.:] )|\b(?:need|put|collect|count off) "
_LIST = re.compile(r"\b(?:number(?:ed|s)|bullet(?:s|ed)?|list|(?:behind|with) a dash)\b", re.I)

_AT_LEAST = r"(?:at least|no fewer than|no less than|a minimum of) "
_AT_MOST = r"(?:at most|(?:no|not) more than|up to|a maximum of) "
_OR_MORE = r",? or more|,? at (?:the very )?least"
_OR_FEWER = r",? or (?:fewer|less)|,? at (?:the very )?most"

_ITEMS = (
    r" (?:numbered |short |list )?"
    r"(?:bullet points|bullets|points|items|entries|steps|tips)\b(?! of\b)"
)
_NO_ITEMS = (
    r" (?:more |short |whole |full )?(?:sentence|word|line|paragraph|heading|stanza|verse|time|part"
    r"|section|page|second|minute|hour|day|week|month|year|percent|euro|dollar|pound|people)s?\b"
)
_ASKED = re.compile(
    rf"(?:(?P<request>{_REQUEST})|(?P<mild_request>{_MILD_REQUEST}))?"
    rf"(?:(?P<at_least>{_AT_LEAST})|(?P<at_most>{_AT_MOST})|(?:exactly|just|only) )?"
    rf"\b(?P<number>{_NUMBER})(?![\w%:-]|[.,]\d)(?!{_NO_ITEMS})"
    rf"(?: (?:or|to) (?P<upper>{_NUMBER}))?"
    rf"(?P<or_more>{_OR_MORE})?(?P<or_fewer>{_OR_FEWER})?"
    rf"(?P<items>{_ITEMS})?(?P<items_or_more>{_OR_MORE})?(?P<items_or_fewer>{_OR_FEWER})?",
    re.I,
)
_FOR_EACH = re.compile(r"\b(?:for|of|in|under|on) (?:each|every|both)\b|\bper\b", re.I)


def requested_items(prompt: str) -> tuple[int, float] | None:
    """Return the smallest and the largest number of items that `prompt` asks for.

    None if it asks for no number, for several, or for a number for each of many things.
    """
    names_list = _LIST.search(prompt) is not None
    limits = {
        _limits(match)
        for match in _ASKED.finditer(" ".join(prompt.split()))
        if match["request"] or match["items"] or (names_list and match["mild_request"] is not None)
    }
    if len(limits) != 1 or _FOR_EACH.search(prompt):
        return None
    return limits.pop()


def _limits(match: re.Match[str]) -> tuple[int, float]:
    number = _value(match["number"])
    if match["upper"]:
        return number, _value(match["upper"])
    if match["at_least"] or match["or_more"] or match["items_or_more"]:
        return number, math.inf
    if match["at_most"] or match["or_fewer"] or match["items_or_fewer"]:
        return 1, number
    return number, number


def _value(number: str) -> int:
    return int(number) if number.isdigit() else _NUMBERS.index(number.casefold()) + 2
