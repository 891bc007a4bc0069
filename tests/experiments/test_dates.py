import datetime
import itertools
import re
import subprocess
import sys
from collections import Counter

import pytest

from experiments.translate import date_forms as forms
from experiments.translate import dates, numerals
from experiments.translate.date_forms import FORMS, SeededChoice
from experiments.translate.dates import written_date

DAY = datetime.date(1987, 4, 2)  # a Thursday
MONTHS = {name[:3]: i for i, name in enumerate(
    "jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)}  # fmt: skip
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first "
    "twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh "
    "twenty-eighth twenty-ninth thirtieth thirty-first"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
DIGITS = {c: str(i % 10) for row in ("〇一二三四五六七八九", "零壹贰叁肆伍陆柒捌玖",
          "０１２３４５６７８９") for i, c in enumerate(row)}  # fmt: skip
WEEKDAY = "星期|周|週|礼拜|禮拜"


# A reader of every form, written from what the forms promise and not from how they are made


def spoken(words):
    """A number below 100 in words."""
    tens, _, ones = words.partition("-")
    if tens in TENS:
        return 20 + 10 * TENS.index(tens) + (UNITS.index(ones) if ones else 0)
    return UNITS.index(words)


def spoken_year(words):
    if words.startswith("two thousand"):
        return 2000 + spoken(words.removeprefix("two thousand").removeprefix(" and ") or "zero")
    century, rest = words.split()
    return 100 * spoken(century) + (0 if rest == "hundred" else spoken(rest))


def read_words(text):
    match = re.fullmatch(r"(?:the )?(\S+) of (\w+) (.+)|(\w+) (\S+), (.+)", text)
    day, month, year = match.group(1, 2, 3) if match[1] else match.group(5, 4, 6)
    year = re.sub(r" oh (\w+)$", r" \1", year)
    return spoken_year(year), MONTHS[month[:3]], 1 + ORDINALS.index(day)


def read_english(text):
    """Numbers and the name of a month, in any order that leaves no doubt."""
    text = text.lower()
    weekday = next((name for name in DAYS if re.match(f"({name}|{name[:3]})[ ,]", text)), None)
    if weekday:
        text = re.sub(r"^[a-z]+,? ", "", text)
    if re.search(r"nineteen|twenty |two thousand", text):
        return *read_words(text), None
    if re.fullmatch(r"\d{8}", text):
        return int(text[:4]), int(text[4:6]), int(text[6:]), None
    parts = re.findall(r"[a-z]+|\d+", re.sub(r"(?<=\d)(st|nd|rd|th)\b|\bthe\b|\bof\b", " ", text))
    roman = "i ii iii iv v vi vii viii ix x xi xii".split()
    named = [MONTHS.get(p[:3]) or roman.index(p) + 1 for p in parts if p.isalpha()]
    numbers = [int(p) for p in parts if p.isdigit()]
    if len(next(p for p in parts if p.isdigit())) == 4:
        year, *rest = numbers
        month, day = (named + rest) if named else rest
    elif named:
        day, year = numbers
        (month,) = named
    elif "/" in text:
        month, day, year = numbers
    else:
        day, month, year = numbers
    if year < 100:
        year += 1900 if year >= 50 else 2000
    return year, month, day, None if weekday is None else DAYS.index(weekday)


def counted(text):
    """A number by its value: 二十二, 廿二, 一百零五, 零壹拾."""
    text = text.replace("廿", "二十").replace("卅", "三十").replace("拾", "十").lstrip("零")
    text = re.sub(r"^十", "一十", text).replace("百十", "百一十")
    digits = "".join(DIGITS.get(c, c) for c in text)
    if not re.search("[十百]", digits):
        return int(digits)
    hundreds, tens, ones = re.fullmatch(r"(?:(\d)百0?)?(?:(\d)十)?(\d)?", digits).groups("0")
    return 100 * int(hundreds) + 10 * int(tens) + int(ones)


def read_chinese(text):
    weekday = re.search(f"(?:{WEEKDAY})(.)", text)
    text = re.sub(f"[（，]?(?:{WEEKDAY}).[），]?| ", "", text)
    text = text.removeprefix("公元").translate(
        str.maketrans("０１２３４５６７８９－／", "0123456789-/")
    )
    republic = re.match("民[国國]", text)
    text = re.sub("^民[国國]", "", text)
    year, month, day = re.fullmatch(r"(.+?)[年/-](.+?)[月/-](.+?)[日号號]?", text).groups()
    if republic:
        year = 1911 + (1 if year == "元" else counted(year))
    else:
        year = int("".join(DIGITS.get(c, c) for c in year))
        if year < 100:
            year += 1900 if year >= 50 else 2000
    return year, counted(month), counted(day), weekday and "一二三四五六日".index(weekday[1])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_back_by_another_reader(form):
    read = {"en": read_english, "zh": read_chinese}[FORMS[form].language]
    saw_weekday = 0
    for index in range(1500):
        written = written_date(index, seed=5, form=form)
        *day, weekday = read(written.text)
        assert datetime.date(*day) == written.date, written.text
        saw_weekday += weekday is not None
        assert weekday in (None, written.date.weekday()), written.text
    assert saw_weekday == (1500 if form in ("weekday", "星期") else 0)


def test_the_table_of_forms_shows_what_they_write():
    """Each example of the table is one of the texts of its form, for the day it names."""
    lines = re.findall(r"^    (\S.*?)  +(en|zh)  +(.+)$", forms.__doc__, flags=re.M)
    assert [name for name, _, _ in lines] == list(FORMS)
    for name, language, examples in lines:
        form = FORMS[name]
        assert form.language == language
        texts = {form.write(DAY, SeededChoice(i)) for i in range(500)}
        assert set(examples.split(" | ")) <= texts, name
    assert DAY.strftime("%A") == "Thursday"


def test_no_two_days_have_one_text():
    seen = {}
    for index in range(8_000):
        text, day = written_date(index, seed=1)[1:]
        assert seen.setdefault(text.lower(), day) == day, text


def test_the_target_is_the_day_in_iso_form():
    written = written_date(3, seed=0)
    assert written.pair == (written.text, written.date.strftime("%Y-%m-%d"))
    assert datetime.date.fromisoformat(written.pair.target) == written.date


@pytest.mark.parametrize(
    "form, first, last",
    [("short year", 1950, 2049), ("短年", 1950, 2049), ("民国", 1912, 2099), ("dots", 1900, 2099)],
)
def test_every_form_keeps_to_its_years(form, first, last):
    years = {written_date(i, seed=0, form=form).date.year for i in range(3000)}
    assert (min(years), max(years)) == (first, last)
    assert len(years) == last - first + 1


# The same for the same arguments


def test_dates_depend_on_seed_index_part_and_nothing_else():
    def draw(**how):
        return [written_date(i, **how) for i in range(50)]

    assert draw(seed=0) == draw(seed=0)
    different = [draw(seed=0), draw(seed=1), draw(seed=0, split="held_out")]
    for some, other_dates in itertools.combinations(different, 2):
        assert sum(a == b for a, b in zip(some, other_dates, strict=True)) <= 1


@pytest.mark.slow
def test_another_process_writes_the_same():
    """With other hashes of strings."""
    code = "from experiments.translate.dates import written_date as w; "
    code += "print([w(i, seed=9).text for i in range(6)])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.stdout.strip() == str([written_date(i, seed=9).text for i in range(6)])


# What is held out


def test_a_day_is_to_train_on_or_held_out_in_every_form():
    parts = {
        part: {written_date(i, seed=0, split=part).date for i in range(1500)}
        for part in ("train", "held_out")
    }
    assert not parts["train"] & parts["held_out"]
    assert all(dates.is_held_out(day) for day in parts["held_out"])


def test_a_tenth_of_the_calendar_is_held_out_and_every_month_has_some():
    first = datetime.date(1900, 1, 1).toordinal()
    days = [datetime.date.fromordinal(first + i) for i in range(73_049)]
    assert days[-1] == datetime.date(2099, 12, 31)
    held_out = [day for day in days if dates.is_held_out(day)]
    assert abs(len(held_out) / len(days) - 0.1) < 0.005
    assert {(day.month, day.day) for day in held_out} >= {(2, 29), (12, 31)}
    assert len({day.month for day in held_out}) == 12


def test_forms_are_drawn_by_their_weights_and_days_evenly():
    drawn = [written_date(i, seed=2) for i in range(6_000)]
    counts, total = Counter(d.form for d in drawn), sum(form.weight for form in FORMS.values())
    for name, form in FORMS.items():
        expected = len(drawn) * form.weight / total
        assert abs(counts[name] - expected) < 5 * expected**0.5, name
    months = Counter(d.date.month for d in drawn)
    assert min(months.values()) > 400 and max(months.values()) < 600


def test_a_form_that_is_none_is_refused():
    with pytest.raises(ValueError, match="There is no form 'runes'. Forms: day first, month"):
        written_date(0, seed=0, form="runes")


# Numerals


def test_numbers_in_words():
    assert [numerals.english(n) for n in range(20)] == UNITS
    assert [numerals.english(n) for n in (20, 21, 40, 99)] == [
        *("twenty", "twenty-one", "forty", "ninety-nine")
    ]
    assert [numerals.english_ordinal(n) for n in range(1, 32)] == ORDINALS
    words = {1900: "nineteen hundred", 1905: "nineteen oh five", 1987: "nineteen eighty-seven"}
    words |= {2000: "two thousand", 2009: "two thousand and nine", 2010: "twenty ten"}
    assert {year: numerals.english_year(year) for year in words} == words


def test_places_in_digits():
    assert " ".join(map(numerals.ordinal, (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31, 111))) == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th 31st 111th"
    )


def test_chinese_numbers():
    values = {2: "二", 10: "十", 11: "十一", 20: "二十", 31: "三十一", 99: "九十九"}
    values |= {100: "一百", 101: "一百零一", 110: "一百一十", 111: "一百一十一", 188: "一百八十八"}
    assert {n: numerals.chinese(n) for n in values} == values
    assert numerals.chinese_digits("1905") == "一九〇五"
    cheque = {1: "零壹", 10: "零壹拾", 11: "壹拾壹", 20: "零贰拾", 25: "贰拾伍", 31: "叁拾壹"}
    zero_before = (*range(1, 11), 20, 30)
    for number, text in cheque.items():
        assert numerals.chinese_capitals(number, zero_before=zero_before) == text
