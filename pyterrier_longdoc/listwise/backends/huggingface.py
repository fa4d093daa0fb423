"""Chat models of the Hugging Face hub, run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ContextOverflowError
from ..parallel import Lock
from ..prompts import Message
from .base import Reply


@dataclass(eq=False, repr=False)
class HuggingFaceBackend:
    """A causal language model in this process; one prompt at a time.

    Prompts are made by the tokenizer's chat template. For a model whose template knows no system message, use a prompt
    without one: `ListwisePrompt(system="")`. For many prompts, a server such as vLLM behind `OpenAIBackend` is faster.

    Args:
        model: a model on the hub or a folder.
        parameters: of `generate`. Default: greedy, at most 256 new tokens.
        device: `"cuda"`, `"cpu"`, ...; None for a GPU if there is one.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None for that of the checkpoint.
        trust_remote_code: run modelling code that the checkpoint brings along.
    """

    model: str
    _: KW_ONLY
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_new_tokens": 256, "do_sample": False})
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.model = str(self.model)
        self._loaded: tuple[Any, Any] | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"HuggingFaceBackend({Path(self.model).name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters of `generate` and the precision."""
        return {"api": "transformers", "dtype": self.dtype, **self.parameters}

    def __call__(self, messages: Sequence[Message]) -> Reply:
        """Generates an answer.

        Raises:
            ContextOverflowError: if prompt and answer have more tokens than the model has positions.
            ValueError: for a tokenizer without a chat template.
        """
        import torch

        with self._lock:
            model, tokenizer = self._load()
            inputs = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(model.device)
            length = inputs["input_ids"].shape[1]
            positions = getattr(model.config, "max_position_embeddings", None)
            wanted = length + self.parameters.get("max_new_tokens", 1)
            if positions is not None and wanted > positions:
                raise ContextOverflowError(
                    f"{self!r}: the prompt has {length} tokens, which with the answer makes {wanted}; the model takes "
                    f"{positions}"
                )
            with torch.inference_mode():
                generated = model.generate(**inputs, **{"pad_token_id": tokenizer.eos_token_id, **self.parameters})
            new = generated[0, length:]
            return Reply(tokenizer.decode(new, skip_special_tokens=True), length, len(new))

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            from ...modelling.devices import resolve_device, resolve_dtype

            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(self.model, **options)
            if tokenizer.chat_template is None:
                raise ValueError(f"{self!r} has no chat template: use a chat (instruct) model")
            device = resolve_device(self.device)
            dtype = "auto" if self.dtype is None else resolve_dtype(self.dtype, device)
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, **options)
            self._loaded = model.eval().to(device), tokenizer
        return self._loaded
