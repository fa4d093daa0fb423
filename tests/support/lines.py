"""Lines that progress bars leave."""

from __future__ import annotations

import re


def shown_lines(capsys) -> list[str]:
    """The names of the bars that were shown to their end: all that stands on the screen after a run."""
    lines = [line.split("\r")[-1] for line in capsys.readouterr().err.split("\n")[:-1]]  # a bar is written many times
    return [re.match(r"(.*):\s+100%\|", line)[1] for line in lines]
