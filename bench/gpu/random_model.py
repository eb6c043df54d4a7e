"""A model with random weights in the shape of a known one, in a folder as transformers writes it.

    python bench/gpu/random_model.py FOLDER --shape 1.5b

Speed and memory depend on shapes, not on what a model knows, so nothing has to be downloaded. The tokenizer is trained
on the benchmark's own prompts and filled up with words that no text contains, so that every id has a text.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import task

SHAPES: dict[str, dict[str, Any]] = {
    # Llama, as SmolLM2-135M is one.
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    # Qwen2.5-1.5B and Qwen2.5-7B.
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "miniature": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
TIED = {"135m", "1.5b", "miniature"}
"""Shapes whose head is the embedding."""
POSITIONS = 8192
END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEARNED_WORDS = 400
"""Of the tokenizer, beside the words that fill it up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", required=True, choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokenizer", type=Path, help="a folder with another tokenizer and its chat template")
    options = parser.parse_args()
    vocabulary = SHAPES[options.shape]["vocab_size"]
    end = save_tokenizer(options.folder, options.tokenizer, vocabulary)
    weights = save_weights(options.folder, options.shape, options.dtype, end)
    print(json.dumps({"folder": str(options.folder), "shape": options.shape, "weights": weights}), flush=True)


def save_tokenizer(folder: Path, source: Path | None, vocabulary: int) -> int:
    """Write a tokenizer with so many words; returns the id that ends an answer."""
    if source is None:
        tokenizer = trained_tokenizer()
        tokenizer.save_pretrained(folder)
    else:
        tokenizer = copied_tokenizer(source, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    # Special tokens that the vocabulary lacks would get ids after its last one when it is read again.
    words |= {one["content"]: one["id"] for one in content["added_tokens"]}
    taken = set(words.values())
    words |= {f"\u0120q{number}": number for number in range(vocabulary) if number not in taken}
    path.write_text(json.dumps(content, ensure_ascii=False))
    return int(tokenizer.eos_token_id)


def copied_tokenizer(source: Path, folder: Path) -> Any:
    """Another model's, file by file: transformers may write another class than it read."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    for path in (*source.glob("*token*.json"), *source.glob("chat_template*")):
        shutil.copyfile(path, folder / path.name)
    return transformers.AutoTokenizer.from_pretrained(source)


def trained_tokenizer() -> Any:
    """Pieces of the benchmark's own prompts."""
    import tokenizers
    import transformers

    pieces = tokenizers.ByteLevelBPETokenizer()
    texts = [task.letters_messages(one)[0]["content"] for one in task.tasks(200, seed=0)]
    texts += [message["content"] for message in task.EXAMPLE]
    pieces.train_from_iterator(texts, vocab_size=LEARNED_WORDS, min_frequency=2, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, eos_token=END, pad_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_weights(folder: Path, shape: str, dtype: str, end: int) -> int:
    """Write random weights, made on the GPU if there is one; returns how many they are."""
    import torch
    import transformers

    kind = transformers.LlamaConfig if shape in ("135m", "miniature") else transformers.Qwen2Config
    config = kind(
        **SHAPES[shape],
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=shape in TIED,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    network.generation_config.do_sample = True
    network.save_pretrained(folder)
    return sum(weight.numel() for weight in network.parameters())


if __name__ == "__main__":
    main()
