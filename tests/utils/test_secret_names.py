"""Which names say that their value is a secret, and what is left of a configuration without them."""

import pytest

from agentlightning.utils.secret_names import is_secret_name, masked


@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_API_KEY", "GITHUB_TOKEN", "api_key", "apiKey", "APIKEY", "api-key", "x-api-key", "accessToken"),
        *("client_secret", "PGPASSWORD", "DB_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS", "api_keys", "Authorization"),
        *("litellm.api_key", "key", "ssh_passphrase", "accesstoken", "clientsecret", "pwd", "db_pwd", "api_key_2"),
        *("Cookie", "set-cookie", "dsn", "SENTRY_DSN", "access_tokens", "password_2"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("MONKEY", "keyboard", "token_ids", "tokenizer", "key_size", "secretary", "", "model", "max_tokens"),
        *("n_keys", "monkey", "prompt_tokens", "PWD", "OLDPWD", "cwd"),
    ],
)
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


def test_secrets_in_addresses_and_command_lines_are_masked() -> None:
    config = {
        "database": "postgresql://me:hunter2@host/runs?sslmode=on&password=p&limit=3",
        "argv": ["train.py", "--api-key", "sk-1", "--max-tokens", "512", "--token=t", "--key", "--verbose"],
        "command": "train.py --hub-token hf-1 --n-keys 3 --password=p --out a--key",
    }

    assert masked(config) == {
        "database": "postgresql://***@host/runs?sslmode=on&password=***&limit=3",
        "argv": ["train.py", "--api-key", "***", "--max-tokens", "512", "--token=***", "--key", "***"],
        "command": "train.py --hub-token *** --n-keys 3 --password=*** --out a--key",
    }
