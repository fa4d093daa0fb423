"""Lines that progress bars leave."""

from __future__ import annotations

import re


def shown_lines(capsys) -> list[str]:
    """The names of the bars that were shown to their end: all that stands on the screen after a run."""
    return lines_in(capsys.readouterr().err)


def lines_in(text: str) -> list[str]:
    """The same of what was written."""
    lines = [line.split("\r")[-1] for line in text.split("\n")[:-1]]  # a bar is written many times
    return [done[1] for line in lines if (done := re.match(r"(.*):\s+100%\|", line))]
