"""The pages of reference of the packages in ``packages/``: signatures and docstrings of what is in ``__all__``."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

RETURNS = [("blocking", "Operation", r"\1"), ("paged", "Pages", r"Iterator[\1]")]
"""Decorators of the store's client, which methods return for them, and what callers get."""


class Member(NamedTuple):
    """A field, constant, method or property: its source without the body, and its docstring."""

    code: str
    text: str
    is_function: bool = False


def reference(package: str, *others: str) -> str:
    """Return the page of reference of a package and of its ``others``, which are public modules."""
    paths = [package, *(f"{package}.{other}" for other in others)]
    every = [f"`{path}.__all__`" for path in paths]
    listed = f"{', '.join(every[:-1])} and {every[-1]}" if others else every[0]
    blocks = [
        f"# Reference of {package}",
        textwrap.fill(f"The names in {listed}. All others are private, and may change in any version.", 120),
        "\n".join(
            f"- [{name}](#{_heading(path, name, package).lower().replace('.', '')})"
            for path in paths
            for name in import_module(path).__all__
        ),
    ]
    for path in paths:
        module = import_module(path)
        for name in module.__all__:
            value = getattr(module, name)
            shown = _class(value, module) if inspect.isclass(value) else _other(name, value, path)
            blocks += [f"## {_heading(path, name, package)}", *shown]
    return "\n\n".join([*blocks, "`make docs` writes this page from the docstrings."]) + "\n"


def _heading(path: str, name: str, package: str) -> str:
    """Return a name after the package, such as "Consumer" and "django.once"."""
    return f"{path}.{name}".removeprefix(f"{package}.")


def _other(name: str, value: Any, path: str) -> Iterator[str]:
    """Yield a function or a constant, which the package or module declares in one place."""
    if isinstance(value, FunctionType):
        declared = sys.modules[value.__module__]
    else:
        modules = [module for other, module in sys.modules.items() if f"{other}.".startswith(f"{path}.")]
        [declared] = [module for module in modules if name in _members(module)]
    yield from _shown(_members(declared)[name])


def _class(shown: type[Any], module: ModuleType) -> Iterator[str]:
    """Yield a class with its members and those of private bases. A public base documents its own."""
    ours = [one for one in shown.__mro__ if one.__module__.partition(".")[0] == module.__name__]
    private = [one for one in ours if one is shown or getattr(module, one.__name__, None) is not one]
    bases = list(_bases(shown, private))
    members = {name: member for one in reversed(private) for name, member in _members(one).items()}
    create = members.pop("__init__", None)
    members = {name: member for name, member in members.items() if not name.startswith("_")}
    head = f"class {shown.__name__}" + (f"({', '.join(bases)})" if bases else "")
    fields = {name: member for name, member in members.items() if not member.is_function}
    yield _code("\n    ".join([f"{head}:" if fields else head, *(field.code for field in fields.values())]))
    if shown.__doc__:
        yield _markdown(shown.__doc__)
    if create:
        yield _code(create.code.replace("def __init__", shown.__name__).removesuffix(" -> None"))
    documented = [f"- `{name}`: {_markdown(field.text)}" for name, field in fields.items() if field.text]
    if documented:
        yield "\n".join(documented)
    for name, member in members.items():
        is_override = any(hasattr(one, name) for one in ours if one not in private)
        if member.is_function and (member.text or not is_override):
            yield from _shown(member)


def _bases(shown: type[Any], private: list[type[Any]]) -> Iterator[str]:
    """Yield the names of a class's bases, with those of a private base instead of its own."""
    for one in shown.__bases__:
        if one in private:
            yield from _bases(one, private)
        elif one is not object:
            yield "NamedTuple" if one is tuple else one.__name__


def _members(source: Any) -> dict[str, Member]:
    """Return what a module or class declares, by name."""
    scope = vars(source if inspect.ismodule(source) else sys.modules[source.__module__])
    code = _with_values(textwrap.dedent(inspect.getsource(source)), scope)
    lines, body = code.splitlines(), ast.parse(code).body
    if inspect.isclass(source):
        body = body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            head = "\n".join(lines[node.lineno - 1 : max(node.lineno, node.body[0].lineno - 1)])
            head = re.sub(r":( \.\.\.)?$", "", re.sub(r" +#.*", "", textwrap.dedent(head)))
            head = re.sub(r"\((\n    )?(self|cls)(,\s)?\s*", r"(\1", head)
            decorators = [ast.unparse(one) for one in node.decorator_list]
            if "property" in decorators and node.returns:
                head = f"{node.name}: {ast.unparse(node.returns)}".replace("'", "")
            elif "classmethod" in decorators:
                head = f"@classmethod\n{head}"
            for decorator, written, returned in RETURNS:
                if decorator in decorators:
                    head = re.sub(rf"-> {written}\[(.*)\]$", f"-> {returned}", head)
            found[node.name] = Member(head, ast.get_docstring(node) or "", is_function=True)
        elif wraps := re.fullmatch(r"(\w+) = (awaited|paged)\((\w+)\.(\w+)\)", ast.unparse(node)):
            head = _members(scope[wraps[3]])[wraps[4]].code
            head = f"async {head}" if wraps[2] == "awaited" else head.replace("-> Iterator", "-> AsyncIterator")
            found[wraps[1]] = Member(head, "", is_function=True)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            text = ast.get_docstring(ast.Module([following], [])) if isinstance(following, ast.Expr) else ""
            found[ast.unparse(target)] = Member(ast.get_source_segment(code, node) or "", text or "")
    return found


def _with_values(code: str, scope: dict[str, Any]) -> str:
    """Replace constants that are the default of something by their values."""

    def value(match: re.Match[str]) -> str:
        found = scope.get(match[1])
        return "= " + repr(found).replace("'", '"') if isinstance(found, int | float | str) else match[0]

    return re.sub(r"= ([A-Z][A-Z_]+)\b(?!\.)", value, code)


def _shown(member: Member) -> Iterator[str]:
    yield _code(member.code)
    if member.text:
        yield _markdown(member.text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: code in single backticks."""
    text = inspect.cleandoc(docstring or "").replace("``", "`")
    return re.sub(r"::$", ":", re.sub(r"^::\n\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
