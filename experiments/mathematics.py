"""Equations of docstrings, which are written as in Python, as MathML that browsers typeset.

MathML needs neither a network nor a script. What is no equation in this small language (words,
programs, drawings) is left as it is.
"""

import html
import re
from typing import NamedTuple

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "theta": "θ", "lambda": "λ", "pi": "π", "phi": "φ",
}  # fmt: skip
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\d_]*(?:\.\d+)?)|(?P<name>[A-Za-z_]\w*'?)"
    r"|(?P<sign>\.\.\.|\*\*|//|->|<=|>=|==|[-+*/@=<>%()\[\],:.|^]))"
)
RELATIONS = {
    "...": "…",
    "=": "=",
    "==": "=",
    "->": "↦",
    "<=": "≤",
    ">=": "≥",
    "<": "&lt;",
    ">": "&gt;",
}
BRACKETS = {"abs": "||", "floor": "⌊⌋", "ceil": "⌈⌉"}
WORDS = {"if", "else", "and", "or", "of", "over", "where", "mod"}
THIN, WIDE = '<mspace width="0.2em"/>', '<mspace width="2em"/>'


class NotAnEquationError(ValueError):
    """Text that is not in the language of our equations."""


class Part(NamedTuple):
    """A piece of MathML.

    Attributes:
        text: With its parentheses.
        bare: Without them, for where a fraction, a root or an exponent makes them needless.
        kind: "number", "symbol" (one letter, or with indices), "word" or "other".
    """

    text: str
    bare: str
    kind: str = "other"


def to_mathml(equation: str) -> str | None:
    """Typeset an equation of one or more lines.

        a / b -> fraction;   x[i] -> index;   sum over j of x[j] -> a sum over j

    Args:
        equation: As it stands in a docstring, without its indentation.

    Returns:
        A ``<math>`` element that holds the source as its annotation; None for what is no equation.
    """
    rows = []
    for line in equation.splitlines():
        pieces = re.split(r"(;\s+|,\s{2,}|\s{3,})", line.strip())
        cells = []
        for number, piece in enumerate(pieces[::2]):
            try:
                cells.append(Parser(piece).whole())
            except NotAnEquationError:
                if number == 0:
                    return None
                cells.append(f"<mtext>{html.escape(piece)}</mtext>")
        indent = WIDE if line.startswith(" ") else ""
        rows.append(f"<mrow>{indent}{WIDE.join(cells)}</mrow>")
    lines = "".join(f"<mtr><mtd>{row}</mtd></mtr>" for row in rows)
    source = html.escape(equation, quote=False)
    return (
        f'<math display="block"><semantics><mtable columnalign="left" displaystyle="true">{lines}'
        f'</mtable><annotation encoding="text/plain">{source}</annotation></semantics></math>'
    )


class Parser:
    """Reads one expression, or several that commas separate."""

    def __init__(self, text: str):
        """Split into words and signs.

        Raises:
            NotAnEquationError: There is something else.
        """
        self.tokens: list[tuple[str, str]] = []
        at, text = 0, text.rstrip()
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                raise NotAnEquationError(text)
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            at = match.end()
        self.at = 0
        self.inline = 0  # exponents and indices, one inside another, in which fractions are small

    def next(self, ahead: int = 0) -> str:
        """The word or sign that comes; nothing at the end."""
        at = self.at + ahead
        return self.tokens[at][1] if at < len(self.tokens) else ""

    def accept(self, *signs: str) -> str:
        """Take the next if it is one of these; nothing else."""
        sign = self.next()
        if sign and sign in signs:
            self.at += 1
            return sign
        return ""

    def expect(self, sign: str) -> None:
        """Take this.

        Raises:
            NotAnEquationError: Another comes.
        """
        if not self.accept(sign):
            raise NotAnEquationError(self.next())

    def whole(self) -> str:
        """All of the text.

        Raises:
            NotAnEquationError: Something is left over.
        """
        first = self.accept("+", "-", "=")  # of a line that goes on
        text = (f"<mo>{first}</mo>" if first else "") + self.items("")
        if self.next():
            raise NotAnEquationError(self.next())
        return text

    def items(self, end: str) -> str:
        """Expressions between commas, up to a closing sign."""
        parts = []
        while self.next() != end:
            if self.accept(":"):
                parts.append("<mo>:</mo>")
            elif self.accept("*"):
                parts.append("<mo>∗</mo>")
            elif self.accept(","):
                parts.append("<mo>,</mo>")
            elif parts and not parts[-1].startswith("<mo>"):
                break
            else:
                parts.append(self.choice().text)
        return "".join(parts)

    def choice(self) -> Part:
        """``a if b else c``, ``a or b``, relations."""
        text = self.relation()
        while word := self.accept("and", "or", "if", "else"):
            text += f"<mtext>&#160;{word}&#160;</mtext>{self.relation()}"
        return Part(text, text)

    def relation(self) -> str:
        """Sums with signs of comparison between them."""
        text = self.sum().text
        while sign := self.accept(*RELATIONS, "mod"):
            text += f"<mo>{RELATIONS.get(sign, 'mod')}</mo>{self.sum().text}"
        return text

    def sum(self) -> Part:
        """Terms."""
        part = self.product()
        while sign := self.accept("+", "-"):
            text = f"{part.text}<mo>{'−' if sign == '-' else sign}</mo>{self.product().text}"
            part = Part(text, text)
        return part

    def product(self) -> Part:
        """Factors; what stands before a stroke is a numerator."""
        part = self.factor()
        while True:
            if stroke := self.accept("/", "//"):
                text = self.fraction(part, self.factor())
                if stroke == "//":
                    text = f"<mrow><mo>⌊</mo>{text}<mo>⌋</mo></mrow>"
            elif self.accept("*"):
                right = self.factor()
                close = part.kind == "number" and right.kind == "symbol"
                text = f"{part.text}{THIN if close else '<mo>·</mo>'}{right.text}"
            elif self.accept("%"):
                text = f"{part.text}<mo>mod</mo>{self.factor().text}"
            elif self.accept("@") or self.is_beside(part):
                text = f"{part.text}{THIN}{self.factor().text}"
            else:
                return part
            part = Part(text, text)

    def fraction(self, above: Part, below: Part) -> str:
        """One number over another, or beside it where that is small."""
        if self.inline:
            return f"{above.text}<mo>/</mo>{below.text}"
        return f"<mfrac><mrow>{above.bare}</mrow><mrow>{below.bare}</mrow></mfrac>"

    def is_beside(self, part: Part) -> bool:
        """Whether the next word, without a sign before it, can be a factor, as in ``R[i] q[i]``."""
        if self.at >= len(self.tokens) or part.kind == "word":
            return False
        kind, word = self.tokens[self.at]
        if word in {"sum", "mean"} and self.next(1) == "over":
            return True
        short = len(word) == 1 or word in GREEK or re.fullmatch(r"\w+_\w", word)
        return kind == "name" and word not in WORDS and bool(short or self.next(1) in {"[", "("})

    def factor(self) -> Part:
        """A value with its sign and exponent."""
        if self.accept("-"):
            text = f"<mo>−</mo>{self.factor().text}"
            return Part(text, text)
        base = self.value()
        if self.accept("**", "^"):
            self.inline += 1
            text = f"<msup><mrow>{base.text}</mrow><mrow>{self.factor().bare}</mrow></msup>"
            self.inline -= 1
            return Part(text, text, "symbol")
        return base

    def value(self) -> Part:
        """A name, a number, or something in brackets, with indices and attributes."""
        part = self.atom()
        while sign := self.accept("[", "."):
            if sign == "[":
                self.inline += 1
                text = f"<msub><mrow>{part.text}</mrow><mrow>{self.items(']')}</mrow></msub>"
                self.inline -= 1
                self.expect("]")
            else:
                attribute = self.next()
                self.at += 1
                text = (
                    f"<msup><mrow>{part.text}</mrow><mo>⊤</mo></msup>"
                    if attribute == "T"
                    else f"{part.text}<mtext>.</mtext>{name(attribute).text}"
                )
            part = Part(text, text, "symbol")
        return part

    def atom(self) -> Part:
        """The smallest piece."""
        kind, word = self.tokens[self.at] if self.next() else ("", "")
        self.at += 1
        match kind, word:
            case "number", _:
                digits = f"<mn>{word.replace('_', '&#8239;')}</mn>"
                return Part(digits, digits, "number")
            case "name", "sum" | "mean" if self.next() == "over":
                return self.over(word)
            case "name", _ if word not in WORDS:
                return self.call(word) if self.next() == "(" else name(word)
            case "sign", "...":
                return Part("<mo>…</mo>", "<mo>…</mo>")
            case "sign", "(" | "[" | "|":
                end = {"(": ")", "[": "]", "|": "|"}[word]
                inner = self.items(end)
                self.expect(end)
                text = f"<mrow><mo>{word}</mo>{inner}<mo>{end}</mo></mrow>"
                return Part(text, inner if word == "(" else text)
        raise NotAnEquationError(word)

    def over(self, word: str) -> Part:
        """``sum over j <= i of x[j]``: the sign with what is below it, and the product after it."""
        self.expect("over")
        below = self.items("of")
        self.expect("of")
        sign = "<mo>∑</mo>" if word == "sum" else "<mi>mean</mi>"
        text = f"<munder>{sign}<mrow>{below}</mrow></munder>{THIN}{self.product().text}"
        return Part(text, text)

    def call(self, word: str) -> Part:
        """A function with its arguments."""
        self.expect("(")
        inner = self.items(")")
        self.expect(")")
        if word == "sqrt":
            text = f"<msqrt>{inner}</msqrt>"
        elif word in BRACKETS:
            text = f"<mrow><mo>{BRACKETS[word][0]}</mo>{inner}<mo>{BRACKETS[word][1]}</mo></mrow>"
        else:
            text = f"{name(word).text}<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>"
        return Part(text, text, "symbol")


def name(word: str) -> Part:
    """A name: Greek letters as such, one letter after an underscore as an index."""
    word, prime = word.removesuffix("'"), word.endswith("'")
    base, _, index = word.rpartition("_")
    if base and len(index) == 1:
        text = f"<msub>{name(base).text}<mi>{index}</mi></msub>"
    else:
        text = f"<mi>{GREEK.get(word, word)}</mi>"
    text = f"<msup>{text}<mo>′</mo></msup>" if prime else text
    long = len(word) > 1 and word not in GREEK and not text.startswith("<ms")
    return Part(text, text, "word" if long else "symbol")
