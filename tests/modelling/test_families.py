"""The table of architectures, as users read it."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.families import BIDIRECTIONAL, DECODER, FAMILIES, Family

OTHERS = {BIDIRECTIONAL.name: "decoders with ``is_causal: false``", DECODER.name: "other decoders"}
PAGE = Path(ld.__file__).parent / "pt_docs" / "checkpoints.rst"


def row_of_page(family: Family) -> str:
    """A family in the page's table: head, pooling, positions, padding, attention, export and OpenVINO."""
    head = family.head
    attention = "eager, sdpa"
    if family.name in CONFIG_MAPPING:
        model = MODEL_MAPPING[CONFIG_MAPPING[family.name]]
        flags = {"eager": True, "sdpa": model._supports_sdpa, "flash_attention_2": model._supports_flash_attn}
        attention = ", ".join(name for name, is_supported in flags.items() if is_supported)
    cells = (
        OTHERS.get(family.name, f"``{family.name}``"),
        "" if head is None else head.activation or "linear",
        "" if head is None else family.pooling,
        ", ".join(filter(None, (family.positions, "after padding" * family.counts_from_padding))),
        family.rules.padding,
        "" if family.name in OTHERS else attention if family.in_transformers else "its own",
        "yes" * family.supports_export,
        "yes" * family.supports_openvino,
    )
    return "    " + ",".join(f'"{cell}"' for cell in cells)


def test_the_page_prints_every_row_of_the_table():
    rows = [row_of_page(family) for family in (*FAMILIES.values(), BIDIRECTIONAL, DECODER)]
    assert "\n".join(rows) + "\n\n" in PAGE.read_text(encoding="utf-8"), "print this:\n" + "\n".join(rows)
