"""The prompts for the optimiser's models, as POML files: three ways to criticise a prompt, and two to rewrite it."""

from pathlib import Path
from typing import Final

__all__ = ["APPLY_EDIT_PROMPT_FILES", "GRADIENT_PROMPT_FILES"]

_PROMPTS: Final = Path(__file__).parent / "prompts"
GRADIENT_PROMPT_FILES: Final = [
    _PROMPTS / "gradient_conversations.poml",
    _PROMPTS / "gradient_spans.poml",
    _PROMPTS / "gradient_review.poml",
]
APPLY_EDIT_PROMPT_FILES: Final = [_PROMPTS / "edit_rewrite.poml", _PROMPTS / "edit_one_point.poml"]
