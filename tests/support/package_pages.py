"""The programs of a package's own pages, which run as the pages say."""

import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from tests.support.plugin import ROOT

PROGRAM = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)


@contextmanager
def programs_of(package, folder, environment):
    """Write the programs to files in a folder, and yield a function that starts a command of the pages there."""
    pages = [page.read_text() for page in (ROOT / "packages" / package / "docs").glob("*.md")]
    for page in pages:
        for text, name in PROGRAM.findall(page):
            (folder / name).write_text(text)

    def start(command):
        assert any(f"\n    {command}\n" in page for page in pages), command
        program, *arguments = command.split()
        # The environment of the tests has no command `consume`; test_packages_build.py runs it.
        module = ["-m", "guardian_consumers"] if program == "consume" else []
        process = subprocess.Popen(
            [sys.executable, *module, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        at_end.callback(process.communicate)
        at_end.callback(process.kill)
        return process

    with ExitStack() as at_end:
        yield start
