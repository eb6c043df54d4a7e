"""Which names say that their value is a secret, and what is left of a configuration without them."""

import pytest

from agentlightning.utils.secret_names import is_secret_name, masked


@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_API_KEY", "GITHUB_TOKEN", "api_key", "apiKey", "APIKEY", "api-key", "x-api-key", "accessToken"),
        *("client_secret", "PGPASSWORD", "DB_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS", "api_keys", "Authorization"),
        *("litellm.api_key", "key", "ssh_passphrase"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["MONKEY", "keyboard", "token_ids", "tokenizer", "key_size", "secretary", "", "model"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_texts_under_secret_names_are_masked_at_any_depth() -> None:
    config = {
        "model": {"api_key": "sk-1", "name": "m", "headers": [{"Authorization": "Bearer sk-2", "accept": "json"}]},
        "api_keys": ["sk-3", {"main": "sk-4", "limit": 2}],
        "pair": ("a", {"password": "p"}),
    }

    assert masked(config) == {
        "model": {"api_key": "***", "name": "m", "headers": [{"Authorization": "***", "accept": "json"}]},
        "api_keys": ["***", {"main": "***", "limit": 2}],
        "pair": ("a", {"password": "***"}),
    }
    assert config["model"]["api_key"] == "sk-1"  # type: ignore[index] # which is not changed


def test_numbers_and_what_is_empty_stay() -> None:
    config = {"max_tokens": 512, "api_key": None, "token": "", "key": True, 7: "seven"}
    assert masked(config) == config
