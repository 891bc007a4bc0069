"""Written forms of dates, each with several variants.

    form            language   2 April 1987, a Thursday, for example
    --------------  --------   ---------------------------------------------------
    day first       en         2 April 1987 | 02 Apr. 1987
    month first     en         April 2, 1987 | Apr 2 1987
    ordinal         en         April 2nd, 1987 | the 2nd of April 1987
    weekday         en         Thursday, 2 April 1987 | Thu Apr 2nd 1987
    hyphens         en         2-Apr-1987
    slashes         en         4/2/1987 | 04/02/1987
    dots            en         2.4.1987 | 02.04.1987
    roman           en         2.IV.1987 | 2 IV 1987
    year first      en         1987-4-2 | 1987/04/02 | 19870402 | 1987 April 2
    short year      en         2 Apr 87 | April 2, '87 | 4/2/87 | 2.4.87
    words           en         the second of April nineteen eighty-seven
    年月日          zh         1987年4月2日 | 1987 年 04 月 02 日 | 公元1987年4月2号
    数字            zh         一九八七年四月二日 | 一九八七年四月二號
    混写            zh         1987年四月二号
    星期            zh         1987年4月2日 星期四 | 周四，一九八七年四月二日
    短年            zh         87年4月2日 | 八七年四月二日
    民国            zh         民国七十六年四月二日 | 民國76年4月2日
    支票            zh         壹玖捌柒年肆月零贰日
    全角            zh         １９８７年４月２日 | １９８７－０４－０２

These rules make every text unambiguous: the month is first before slashes and the day before dots;
a text that starts with four digits starts with the year; a year of two digits lies in 1950 to 2049;
a year of the republic counts from 1912. English text is also written in lower case or upper case
only. Dates lie in 1900 to 2099.
"""

import datetime
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from experiments.translate.numerals import (
    CAPITALS,
    CHINESE,
    FULL_WIDTH,
    ROMAN,
    chinese,
    chinese_capitals,
    chinese_digits,
    english_ordinal,
    english_year,
    ordinal,
)

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

Option = TypeVar("Option")


class SeededChoice:
    """Deterministic pseudo-random choices from a seed and an index."""

    def __init__(self, *key: int | str):
        # Python guarantees reproducibility across releases for this method only.
        self._draw = random.Random(" ".join(map(str, key))).random

    def __call__(self, *options: Option) -> Option:
        return options[self.below(len(options))]

    def below(self, count: int) -> int:
        """A pseudo-random integer in [0, count)."""
        return int(self._draw() * count)


class Form(NamedTuple):
    """One way to write a date: its name and a function.

    Attributes:
        language: English or Chinese.
        write: Function that writes a date as one of several texts.
        weight: Relative frequency; higher for forms that are harder to learn.
        first_year: First year of its dates.
        last_year: Last year of its dates.
    """

    language: Literal["en", "zh"]
    write: Callable[[datetime.date, SeededChoice], str]
    weight: int = 1
    first_year: int = 1900
    last_year: int = 2099


# English


def _month(date: datetime.date, pick: SeededChoice) -> str:
    name = MONTHS[date.month - 1]
    return pick(name, name, name[:3], f"{name[:3]}.")


def _day_first(date: datetime.date, pick: SeededChoice) -> str:
    return f"{pick(date.day, f'{date.day:02}')} {_month(date, pick)} {date.year}"


def _month_first(date: datetime.date, pick: SeededChoice) -> str:
    return f"{_month(date, pick)} {date.day}{pick(',', '')} {date.year}"


def _ordinal(date: datetime.date, pick: SeededChoice) -> str:
    month, day, comma = _month(date, pick), ordinal(date.day), pick(",", "")
    front = pick(f"{month} {day}", f"{day} {month}", f"{day} of {month}", f"the {day} of {month}")
    return f"{front}{comma} {date.year}"


def _weekday(date: datetime.date, pick: SeededChoice) -> str:
    name = WEEKDAYS[date.weekday()]
    rest = pick(_day_first, _month_first, _ordinal)(date, pick)
    return f"{pick(name, name[:3])}{pick(', ', ' ')}{rest}"


def _hyphens(date: datetime.date, pick: SeededChoice) -> str:
    return f"{pick(date.day, f'{date.day:02}')}-{MONTHS[date.month - 1][:3]}-{date.year}"


def _joined(numbers: tuple[int, ...], mark: str, pick: SeededChoice) -> str:
    """Join numbers with a separator, zero-padded to two digits or not."""
    width = pick(1, 2)
    return mark.join(f"{number:0{width}}" for number in numbers)


def _slashes(date: datetime.date, pick: SeededChoice) -> str:
    return _joined((date.month, date.day, date.year), "/", pick)


def _dots(date: datetime.date, pick: SeededChoice) -> str:
    return _joined((date.day, date.month, date.year), ".", pick)


def _roman(date: datetime.date, pick: SeededChoice) -> str:
    return pick(".", " ").join([str(date.day), ROMAN[date.month - 1], str(date.year)])


def _year_first(date: datetime.date, pick: SeededChoice) -> str:
    numbers = (date.year, date.month, date.day)
    return pick(
        f"{date:%Y%m%d}",
        f"{date.year} {_month(date, pick)} {date.day}",
        *(_joined(numbers, mark, pick) for mark in "-/."),
    )


def _short_year(date: datetime.date, pick: SeededChoice) -> str:
    month, year, mark = _month(date, pick), f"{date.year % 100:02}", pick("", "'")
    return pick(
        f"{date.day} {month} {mark}{year}",
        f"{month} {date.day}, {mark}{year}",
        f"{date.day}-{month[:3]}-{year}",
        f"{date.month}/{date.day}/{year}",
        f"{date.day}.{date.month}.{year}",
    )


def _words(date: datetime.date, pick: SeededChoice) -> str:
    month, day = MONTHS[date.month - 1], english_ordinal(date.day)
    front = pick(f"the {day} of {month}", f"{day} of {month}", f"{month} {day},")
    return f"{front} {english_year(date.year)}"


# Chinese


def _chinese_day(day: int, pick: SeededChoice) -> str:
    """Day in Chinese numerals, in the long form or the short form of 20 to 39."""
    short = {2: "廿", 3: "卅"}.get(day // 10)
    rest = CHINESE[day % 10] if day % 10 else ""
    return pick(chinese(day), chinese(day), f"{short}{rest}") if short else chinese(day)


def _numerals(year: str, date: datetime.date, pick: SeededChoice) -> str:
    """Month and day in Chinese numerals."""
    day = _chinese_day(date.day, pick)
    return f"{year}年{chinese(date.month)}月{day}{pick('日', '日', '号', '號')}"


def _digits(year: str, date: datetime.date, pick: SeededChoice) -> str:
    """Month and day in digits."""
    width, space = pick(1, 1, 2), pick("", "", " ")
    parts = (year, "年", f"{date.month:0{width}}", "月", f"{date.day:0{width}}")
    return space.join((*parts, pick("日", "日", "号", "號")))


def _chinese_year(date: datetime.date, pick: SeededChoice) -> str:
    return chinese_digits(str(date.year)).replace("〇", pick("〇", "零"))


def _in_digits(date: datetime.date, pick: SeededChoice) -> str:
    return pick("", "", "公元") + _digits(str(date.year), date, pick)


def _in_numerals(date: datetime.date, pick: SeededChoice) -> str:
    return pick("", "", "公元") + _numerals(_chinese_year(date, pick), date, pick)


def _mixed(date: datetime.date, pick: SeededChoice) -> str:
    return _numerals(str(date.year), date, pick)


def _chinese_weekday(date: datetime.date, pick: SeededChoice) -> str:
    name = pick("星期", "周", "週", "礼拜", "禮拜") + "一二三四五六日"[date.weekday()]
    rest = pick(_in_digits, _in_numerals)(date, pick)
    return pick(f"{rest} {name}", f"{rest}，{name}", f"{rest}（{name}）", f"{name}，{rest}")


def _chinese_short_year(date: datetime.date, pick: SeededChoice) -> str:
    year = f"{date.year % 100:02}"
    return pick(_digits(year, date, pick), _numerals(chinese_digits(year), date, pick))


def _republic(date: datetime.date, pick: SeededChoice) -> str:
    year = date.year - 1911
    era = pick("民国", "民國")
    numerals = _numerals("元" if year == 1 else chinese(year), date, pick)
    return era + pick(_digits(str(year), date, pick), numerals)


def _cheque(date: datetime.date, pick: SeededChoice) -> str:
    year = chinese_digits(str(date.year), numerals=CAPITALS)
    month = chinese_capitals(date.month, zero_before=(1, 2, 10))
    day = chinese_capitals(date.day, zero_before=(*range(1, 11), 20, 30))
    return f"{year}年{month}月{day}日"


def _full_width(date: datetime.date, pick: SeededChoice) -> str:
    numbers = (date.year, date.month, date.day)
    text = pick(
        f"{date.year}年{date.month}月{date.day}日", *(_joined(numbers, m, pick) for m in "-/")
    )
    return text.translate(FULL_WIDTH)


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "day first": Form("en", _day_first),
        "month first": Form("en", _month_first),
        "ordinal": Form("en", _ordinal),
        "weekday": Form("en", _weekday, weight=2),
        "hyphens": Form("en", _hyphens),
        "slashes": Form("en", _slashes),
        "dots": Form("en", _dots),
        "roman": Form("en", _roman),
        "year first": Form("en", _year_first, weight=2),
        "short year": Form("en", _short_year, first_year=1950, last_year=2049),
        "words": Form("en", _words, weight=2),
        "年月日": Form("zh", _in_digits),
        "数字": Form("zh", _in_numerals),
        "混写": Form("zh", _mixed),
        "星期": Form("zh", _chinese_weekday, weight=2),
        "短年": Form("zh", _chinese_short_year, first_year=1950, last_year=2049),
        "民国": Form("zh", _republic, weight=2, first_year=1912),
        "支票": Form("zh", _cheque),
        "全角": Form("zh", _full_width),
    }
)
