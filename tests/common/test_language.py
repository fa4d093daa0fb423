"""Where sentences end."""

import itertools

import pytest

from pyterrier_longdoc.common.language import sentence_starts


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("No end at all", ["No end at all"]),
        ("Version 1.5 costs 3.20, not more.", ["Version 1.5 costs 3.20, not more."]),
        ('He said "no." Then (he left.) Really.', ['He said "no."', "Then (he left.)", "Really."]),
        ("Wait... what?! Yes.", ["Wait...", "what?!", "Yes."]),
        ("A title\n\nA text\nin two lines", ["A title", "A text\nin two lines"]),
        ("今日は。明日も！本当？", ["今日は。", "明日も！", "本当？"]),  # noqa: RUF001
        ("मैं हूँ। तुम हो।", ["मैं हूँ।", "तुम हो।"]),
        ("ماذا؟ نعم", ["ماذا؟", "نعم"]),
        ("", [""]),
        (". . .", [".", ".", "."]),
    ],
)
def test_sentences(text, sentences):
    bounds = [0, *sentence_starts(text), len(text)]
    assert [text[a:b].strip() for a, b in itertools.pairwise(bounds)] == sentences
