"""A small Llama with random weights in a folder, as transformers writes it: what Hugging Face's path is tested with."""

import importlib
from pathlib import Path
from typing import Any

__all__ = ["HERMES_TEMPLATE", "WORDS", "save_small_llama", "subword_tokenizer", "word_tokenizer"]

END, START = "<|im_end|>", "<|im_start|>"
WORDS = ("red", "green", "blue", "white", "black", "yellow", "pink", "brown")
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORD_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def subword_tokenizer() -> Any:
    """Pieces of bytes, so that any text can be told, and most in several ways."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    words = ["the calculator says what is the answer to this question", "tool_call name arguments expression", "1 2 3"]
    bpe.train_from_iterator(words * 20, vocab_size=400, min_frequency=2)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = HERMES_TEMPLATE
    return tokenizer


def word_tokenizer() -> Any:
    """A dozen words and no others, so that a model that knows nothing says each of them often."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    texts = ("<unk>", END, START, "user", "assistant", *WORDS)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = WORD_TEMPLATE
    return tokenizer


def save_small_llama(
    folder: Path,
    tokenizer: Any,
    *,
    initializer_range: float = 0.3,
    width: int = 32,
    dtype: str = "float32",
    is_tied: bool = False,
) -> Path:
    """Write it, with fewer heads for keys than for queries; the same weights each time."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=is_tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
