r"""The final number of a text, in the forms that models write: 1,200 and $1200.00 and \boxed{1200} and 2400/2."""

from __future__ import annotations

import re
from fractions import Fraction

# A sign counts only where nothing stands before it that it could be subtracted from.
_SIGN = r"(?:(?<![\w.)%])[-+]\s?)?"
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_TENS = r"(?P<times>\s*(?:\\times|\\cdot|×)\s*10)?"
_POWER = rf"(?:{_TENS}\s*\^\s*(?P<brace>\{{\s*)?(?P<power>[-+]?\d{{1,9}})(?!\w|\.\d)(?(brace)\s*\}}))?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:[$€£]\s?(?P<sign_inside>[-+]?))?(?:"
    r"\\[dt]?frac\s*\{\s*(?P<above>-?\d+)\s*\}\s*\{\s*(?P<below>\d+)\s*\}"
    r"|(?P<whole>\d+)\s+(?P<part_above>\d+)\s*/\s*(?P<part_below>\d+)"
    rf"|(?P<number>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d{{1,9}})(?!\w))?{_POWER}(?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?"
    r")"
)
_ANSWER = re.compile(r"\banswer\b\W{0,6}(?:(?:is|was|equals|(?P<asked>of|to))\b|[:=])", re.IGNORECASE)
# "The answer to 5 + 3 is 8."
_SAID = re.compile(r"\b(?:is|was|equals)\b|[:=]", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)")
# What stands for something else, or for nothing: LaTeX's dollars and spaces, Markdown's stars, typographic minus signs.
_CLEANED = [
    (re.compile(r"[\u2212\u2013\u2012\ufe63\uff0d]"), "-"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\{,\}|(?<=\d)(?:\\[,!;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*(?=\{)"), " "),
    # Of units and names, "12 cm^2" and "\text{m}^2".
    (re.compile(r"(?:(?<=[A-Za-z])|(?<=[A-Za-z]\}))\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"), ""),
    (re.compile(r"\*{1,3}|__|`|\\left|\\right|\\[()\[\],!;: ]"), " "),
]
_EXPONENT_LIMIT = 300


def final_number(text: str) -> Fraction | None:
    r"""The number that a text ends with or marks as its answer; `None` where it holds none.

    Args:
        text: what a model wrote. The last `\boxed{}` goes first, then the last `####`, then the last "answer is", then
            the last number.
    """
    for pattern, replacement in _CLEANED:
        text = pattern.sub(replacement, text)
    boxed = _last_box(text)
    if boxed is not None and (found := _numbers(boxed)):
        return found[-1]
    _, marker, tail = text.rpartition("####")
    if marker and (found := _numbers(tail.partition("\n")[0])):
        return found[0]
    for match in reversed(list(_ANSWER.finditer(text))):
        sentence = text[match.end() :].lstrip()
        end = _SENTENCE_END.search(sentence)
        sentence = sentence[: end.start() if end else None]
        said = _SAID.search(sentence) if match["asked"] else None
        for part in (sentence[said.end() :] if said else "", sentence):
            _, _, result = part.rpartition("=")
            if found := _numbers(result):
                return found[0]
        break
    found = _numbers(text)
    return found[-1] if found else None


def _last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` that is closed; braces nest."""
    open_at: list[int | None] = []  # one for each open brace; where the box begins, if it is one
    last: tuple[int, str] | None = None
    for match in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if match[0] != "}":
            open_at.append(match.end() if match[1] else None)
        elif open_at and (start := open_at.pop()) is not None and (last is None or start > last[0]):
            last = (start, text[start : match.start()])
    return last and last[1]


def _numbers(text: str) -> list[Fraction]:
    return [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    sign = -1 if "-" in (part["sign"] or "") + (part["sign_inside"] or "") else 1
    try:
        if part["above"] is not None:
            return sign * Fraction(int(part["above"]), int(part["below"]))
        if part["whole"] is not None:
            return sign * (int(part["whole"]) + Fraction(int(part["part_above"]), int(part["part_below"])))
        value = Fraction(part["number"].replace(",", ""))
        if part["exponent"] is not None:
            exponent = int(part["exponent"])
            if abs(exponent) > _EXPONENT_LIMIT:
                return None
            value *= Fraction(10) ** exponent
        if part["power"] is not None:
            power = int(part["power"])
            if abs(power) * (len(part["number"]) + abs(int(part["exponent"] or 0))) > 10 * _EXPONENT_LIMIT:
                return None
            value = value * Fraction(10) ** power if part["times"] else value**power
        if part["divisor"] is not None:
            value /= Fraction(part["divisor"])
        return sign * value
    except (ZeroDivisionError, ValueError):  # 1/0; more digits than Python reads
        return None
