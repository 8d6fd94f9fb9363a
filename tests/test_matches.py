"""A refusal is matched by what it names, a setting, a value or a file, and not by its sentence: so
a sentence can be made better without an edit of tests. The sentences of the two doors, the command
line and the library, stand in two files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SENTENCES = {"cli/test_main.py", "strangers/test_refusals.py"}
MOST = 4
"""Words in a row that a match may have where they are no names and no values."""
WORD = re.compile(r"[A-Za-z][a-z]+[,:;]?")
FILES = [
    file
    for file in sorted(TESTS.rglob("test_*.py"))
    if file.relative_to(TESTS).as_posix() not in SENTENCES
]


def longest_run(pattern: str) -> int:
    """Count the words in a row of a pattern: `.*`, a name, a number or a sign ends a row."""
    most = row = 0
    for word in pattern.replace(".*", " .* ").split():
        row = row + 1 if WORD.fullmatch(word) else 0
        most = max(most, row)
    return most


def texts(node: ast.expr) -> Iterator[str]:
    """Give the literal texts of a value, with a name in place of what is put into them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )


def cases(test: ast.FunctionDef, argument: str) -> Iterator[ast.expr]:
    """Find the values that `parametrize` gives an argument of a test, where they stand there."""
    for mark in test.decorator_list:
        if not (isinstance(mark, ast.Call) and len(mark.args) > 1):
            continue
        names, values = mark.args[:2]
        if not isinstance(values, ast.List):
            continue
        arguments = [name for text in ast.walk(names) for name in _names(text)]
        if argument not in arguments:
            continue
        place = arguments.index(argument)
        for case in values.elts:
            if isinstance(case, ast.Call) and len(case.args) == len(arguments):
                yield case.args[place]
            elif isinstance(case, ast.Tuple) and len(arguments) > 1:
                yield case.elts[place]
            else:
                yield case


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",")]
    return []


def matches(source: str) -> Iterator[tuple[int, str]]:
    """Find the patterns by which the tests of a file match errors, with their lines."""
    for test in ast.walk(ast.parse(source)):
        if not isinstance(test, ast.FunctionDef):
            continue
        for node in ast.walk(test):
            if not (isinstance(node, ast.keyword) and node.arg == "match"):
                continue
            found: list[ast.expr] = [node.value]
            if isinstance(node.value, ast.Name):
                found = list(cases(test, node.value.id))
            for value in found:
                yield from ((value.lineno, text) for text in texts(value))


def test_a_refusal_is_matched_by_what_it_names() -> None:
    found = [
        (f"{file.relative_to(TESTS)}:{line}: {text}", text)
        for file in FILES
        for line, text in matches(file.read_text("utf-8"))
    ]
    assert len(found) > 500
    assert not [place for place, text in found if longest_run(text) > MOST]
    assert not [place for place, text in found if len(text.strip(".*")) < 2]


def test_a_sentence_is_found_wherever_it_stands() -> None:
    source = """
@pytest.mark.parametrize(("value", "said"), [(1, "train.batch=1"), (2, "it is much too large")])
def test_one(value, said):
    with pytest.raises(UserError, match=said):
        do(value)
    with pytest.raises(UserError, match=f"{value} is below what it is"):
        do(0)
"""
    found = [longest_run(text) for _, text in matches(source)]
    assert found == [0, 5, 5]
