"""English and Chinese numerals, as far as dates need."""

from collections.abc import Container

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"},
    **{"nine": "ninth", "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"},
}
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
CHINESE = "〇一二三四五六七八九"
CAPITALS = "零壹贰叁肆伍陆柒捌玖"  # on cheques, as they are hard to forge
FULL_WIDTH = str.maketrans("0123456789-/", "０１２３４５６７８９－／")


def english(number: int) -> str:
    """Number below 100 in English words: "eighty-seven"."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return f"{TENS[tens]}-{ONES[ones]}" if ones else TENS[tens]


def english_ordinal(number: int) -> str:
    """Ordinal below 40 in English words: "twenty-second"."""
    head, hyphen, last = english(number).rpartition("-")
    return head + hyphen + ORDINALS.get(last, f"{last}th")


def ordinal(number: int) -> str:
    """Ordinal in digits: "22nd"."""
    teens = 10 < number % 100 < 20
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def english_year(year: int) -> str:
    """Year from 1100 to 2999 as spoken: "nineteen oh five", "two thousand and five"."""
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        thousand = f"{ONES[century // 10]} thousand"
        return f"{thousand} and {ONES[rest]}" if rest else thousand
    if rest == 0:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if rest < 10 else ''}{english(rest)}"


def chinese(number: int) -> str:
    """Number below 200 in Chinese numerals: "二十二", "一百零五"."""
    if number >= 100:
        rest = number - 100
        return "一百" + ("" if not rest else f"零{chinese(rest)}" if rest < 10 else _tens(rest))
    tens, ones = divmod(number, 10)
    if not tens:
        return CHINESE[ones]
    return f"{CHINESE[tens] if tens > 1 else ''}十{CHINESE[ones] if ones else ''}"


def chinese_digits(digits: str, *, numerals: str = CHINESE) -> str:
    """Digit by digit, as years are written: "一九〇五"."""
    return "".join(numerals[int(digit)] for digit in digits)


def chinese_capitals(number: int, *, zero_before: Container[int]) -> str:
    """Number below 40 in financial Chinese numerals; ten is written 壹拾.

    Args:
        number: The number.
        zero_before: Numbers that are written with a leading zero, against forgery.
    """
    tens, ones = divmod(number, 10)
    text = f"{CAPITALS[tens]}拾" if tens else ""
    text += CAPITALS[ones] if ones else ""
    return CAPITALS[0] + text if number in zero_before else text


def _tens(rest: int) -> str:
    """Numerals of the tens and units after a hundred, where ten is written 一十."""
    return ("一" if rest < 20 else "") + chinese(rest)
