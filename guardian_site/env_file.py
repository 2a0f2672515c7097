"""The file ``.env``: lines ``NAME=value``, taken literally.

gunicorn.conf.py runs this file, so it imports the standard library only.
"""

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(?:export )?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_QUOTED = {"'": re.compile(r"'[^']*'"), '"': re.compile(r'"(?:[^"\\]|\\.)*"')}


class EnvFile(NamedTuple):
    """The variables of a file, and what is wrong with it, by place. No text contains a part of a value."""

    variables: dict[str, str]
    errors: dict[str, str]


def parse(path: Path) -> EnvFile:
    r"""Read a file. If it does not exist, it has no variables.

    A value ends at the end of its line. Quotes around a whole value are removed. Inside double quotes, a backslash
    escapes ``\``, ``"``, ``$`` and `````.
    """
    found = EnvFile({}, {})
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        return found
    except OSError as error:
        found.errors[path.name] = str(error.strerror)
        return found
    except UnicodeDecodeError:
        found.errors[path.name] = "it is not UTF-8"
        return found
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            name, value = _parse_line(line)
        except ValueError as error:
            found.errors[f"Line {number} of {path.name}"] = str(error)
        else:
            found.variables[name] = value
    return found


def _parse_line(line: str) -> tuple[str, str]:
    if "\0" in line:
        raise ValueError("a variable can't have a NUL character")
    parts = _LINE.fullmatch(line)
    if parts is None:
        raise ValueError("write NAME=value, without blanks around the =")
    name, value = parts[1], parts[2]
    quote = value[:1]
    if quote not in _QUOTED:
        return name, value
    if _QUOTED[quote].fullmatch(value) is None:
        raise ValueError("a value that begins with a quote must end with it, and have none inside")
    value = value[1:-1]
    return name, value if quote == "'" else re.sub(r'\\([\\"$`])', r"\1", value)
