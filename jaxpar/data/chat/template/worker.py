"""A process that renders chat templates, which are programs of strangers, within limits of time and
memory.

It is started as a script, so that it imports nothing but Jinja. Each line of its input is a JSON
object with a template and names to render it with; each line of its output is the list of what it
became. Both are one line each, which are broken here:

    {"template": "{{ greeting }} {{ who }}", "names": [{"greeting": "Hi"}, {"who": 7}],
     "now": "2026-01-31T00:00:00", "seconds": 20}
    [{"text": "Hi ", "generated": null, "undefined": ["who"]},
     {"text": " 7", "generated": null, "undefined": ["greeting"]}]

With `"names": null` the answer is which names the template reads and does not set itself:

    [{"names": ["greeting", "who"]}]

A computation that takes longer than these seconds for one of the names, even one inside a single
operation, ends the process; `render`, which started it, then says so. A line that does not fit into
the memory is answered by an object with an `error`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has no limits of this kind
    resource = None

MEMORY = 2 * 2**30
"""The bytes of memory that a template may take."""
_TOO_LARGE = f"it takes more than {MEMORY >> 30} GiB of memory"
LONGEST = 2**26
"""The characters that a template may write."""
MARK_CHOICES = "".join(map(chr, range(0xE0F0, 0xE100)))
"""Characters for private use, of which two that a text does not have mark what is generated in
it.
"""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, by which templates mark the assistant's
    words.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        opening, closing = _Marks.now
        return opening + caller() + closing


class _Marks:
    """The marks that the tag writes before and after its body while a template is rendered."""

    now: tuple[str, str] = ("", "")


class _Missing(jinja2.Undefined):
    """A name that nothing defines: it is written as nothing, as in `transformers`, and
    remembered.
    """

    written: set[str] = set()  # noqa: RUF012

    def __str__(self) -> str:
        if self._undefined_obj is jinja2.utils.missing and self._undefined_name:
            _Missing.written.add(self._undefined_name)
        return super().__str__()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, whose attributes may not begin with an underscore, as in
    `transformers`.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template cannot set the attribute {name!r}")
        super().__setitem__(name, value)


class _Date:
    """The moment that `strftime_now` writes."""

    now = datetime(2000, 1, 1)


def _write_date(form: str) -> str:
    return _Date.now.strftime(form)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as `transformers` does; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Make Jinja's sandbox with the names and filters that `transformers` gives a template."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    made.undefined = _Missing
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = _write_date
    made.globals["namespace"] = _Namespace
    return made


_ENVIRONMENT = _environment()


@lru_cache
def _compile(text: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(text)


def _render(
    template: str,
    names: dict[str, Any],
    marks: tuple[str, str],
) -> str:
    _Marks.now = marks
    text = _compile(template).render(**names)
    if len(text) > LONGEST:
        raise MemoryError
    return text


def _answer(template: str, names: dict[str, Any]) -> dict[str, Any]:
    """Render a template: its text, where its marks put what is generated, and the names that it
    lacked; or its error.
    """
    try:
        _Missing.written = set()
        text = _render(template, names, ("", ""))
        undefined = sorted(_Missing.written)
        generated = None
        if "endgeneration" in template:
            free = [char for char in MARK_CHOICES if char not in text][:2]
            if free[1:]:
                generated = _marked_spans(
                    text,
                    _render(template, names, (free[0], free[1])),
                    free,
                )
            else:
                generated = None
    except MemoryError:
        return {"error": _TOO_LARGE}
    except Exception as error:  # whatever a stranger's program raises
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"error": said[:300]}
    return {"text": text, "generated": generated, "undefined": undefined}


def _marked_spans(
    text: str,
    marked: str,
    marks: list[str],
) -> list[list[int]] | None:
    """Find the characters [begin, end) of a text between marks; None where marking has changed the
    text.
    """
    opening, closing = marks
    if marked.replace(opening, "").replace(closing, "") != text:
        return None
    spans: list[list[int]] = []
    place = 0
    for char in marked:
        if char == opening:
            spans.append([place, place])
        elif char == closing:
            spans[-1][1] = place
        else:
            place += 1
    return spans


_IN_MACROS = frozenset({"caller", "varargs", "kwargs"})


class _NamesRead:
    """The names that a template reads where it has not set them itself, on at least one way through
    it.
    """

    def __init__(self, tree: jinja2.nodes.Template):
        self.found: set[str] = set()
        self.macros = {macro.name for macro in tree.find_all(jinja2.nodes.Macro)}
        self._read(tree.body, set(_ENVIRONMENT.globals))

    def _read(
        self,
        nodes: Iterable[jinja2.nodes.Node],
        known: set[str],
    ) -> None:
        """Follow nodes in their order, and add what they set to the names that are known."""
        for node in nodes:
            self._read_one(node, known)

    def _read_one(self, node: jinja2.nodes.Node, known: set[str]) -> None:
        match node:
            case jinja2.nodes.Name(ctx="load") | jinja2.nodes.NSRef():
                self.found |= {node.name} - known
            case jinja2.nodes.Name():
                known.add(node.name)
            case jinja2.nodes.Assign():
                self._read([node.node, node.target], known)
            case jinja2.nodes.AssignBlock():
                self._read(node.body, set(known))
                self._read([node.target], known)
            case jinja2.nodes.If():
                self._read_branches(node, known)
            case jinja2.nodes.For():
                self._read([node.iter], known)
                inner = known | {"loop"}
                self._read(
                    [
                        node.target,
                        *([node.test] if node.test else []),
                        *node.body,
                    ],
                    inner,
                )
                self._read(node.else_, set(known))
            case jinja2.nodes.Macro():
                known.add(node.name)
                self._read(node.defaults, known)
                self._read([*node.args, *node.body], known | self.macros | _IN_MACROS)
            case jinja2.nodes.With():
                self._read(node.values, known)
                self._read([*node.targets, *node.body], set(known))
            case jinja2.nodes.CallBlock() | jinja2.nodes.FilterBlock() | jinja2.nodes.Block():
                self._read(node.iter_child_nodes(), set(known))
            case _:
                self._read(node.iter_child_nodes(), known)

    def _read_branches(self, node: jinja2.nodes.If, known: set[str]) -> None:
        """Follow each branch; afterwards the names are known that every branch has set that goes
        on.
        """
        sets: list[set[str]] = []
        for branch in (node, *node.elif_):
            self._read([branch.test], known)
            inner = set(known)
            self._read(branch.body, inner)
            sets += [] if _goes_no_further(branch.body) else [inner]
        inner = set(known)
        self._read(node.else_, inner)
        sets += [] if _goes_no_further(node.else_) else [inner]
        known |= set.intersection(*sets) if sets else set()


def _goes_no_further(body: Iterable[jinja2.nodes.Node]) -> bool:
    """Return whether nodes end with an error, or with the next turn of a loop."""
    for node in body:
        if isinstance(node, (jinja2.nodes.Break, jinja2.nodes.Continue)):
            return True
        for call in (
            node.find_all(jinja2.nodes.Call) if isinstance(node, jinja2.nodes.Output) else ()
        ):
            if isinstance(call.node, jinja2.nodes.Name) and call.node.name == "raise_exception":
                return True
    return False


def _names(template: str) -> dict[str, Any]:
    """Find the names that a template reads and does not set itself; or its error."""
    try:
        return {"names": sorted(_NamesRead(_ENVIRONMENT.parse(template)).found)}
    except Exception as error:  # whatever Jinja's parser raises
        return {"error": (str(error).strip() or type(error).__name__).splitlines()[0][:300]}


def _limit_time(seconds: int) -> None:
    """End this process once it has computed for so many seconds more."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = int(time.process_time()) + 1 + seconds
        # Below a limit of the machine's own, whose signal is the one that anybody sends who ends a
        # process.
        if not (most < 0):
            limit = max(1, min(limit, most - 1))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def main() -> None:
    """Answer lines of the standard input until it ends."""
    if resource is not None:
        for what, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
            _, most = resource.getrlimit(what)
            with contextlib.suppress(OSError, ValueError):  # macOS knows no limit of memory
                resource.setrlimit(what, (limit if most < 0 else min(limit, most), most))
    for line in sys.stdin:
        sys.stdout.write(_reply(line) + "\n")
        sys.stdout.flush()


def _reply(line: str) -> str:
    """Answer a line of the input."""
    try:
        asked = json.loads(line)
        _Date.now = datetime.fromisoformat(asked["now"])
        template = asked["template"]
        _limit_time(asked["seconds"])
        if asked["names"] is None:
            found = [_names(template)]
        else:
            found = []
            for one in asked["names"]:
                _limit_time(asked["seconds"])
                found.append(_answer(template, one))
        # what is left is not the template's, and neither is reading the next line
        _limit_time(asked["seconds"])
        return json.dumps(found)
    except MemoryError:
        return json.dumps({"error": _TOO_LARGE})


if __name__ == "__main__":
    main()
