"""The spelling of spans and attributes is a promise to every reader of stored traces."""

import pytest

from agentlightning import semconv
from agentlightning.semconv import (
    LightningResourceAttributes,
    LightningSpanAttributes,
    LinkAttributes,
    LinkPydanticModel,
    RewardAttributes,
    RewardPydanticModel,
)


@pytest.mark.parametrize("word", ["annotation", "message", "object", "exception", "operation", "reward", "virtual"])
def test_span_names_follow_their_constant(word: str) -> None:
    assert getattr(semconv, f"AGL_{word.upper()}") == f"agentlightning.{word}"


def test_resource_attributes_say_to_whom_a_span_belongs() -> None:
    assert [attribute.value for attribute in LightningResourceAttributes] == [
        "agentlightning.rollout_id",
        "agentlightning.attempt_id",
        "agentlightning.span_sequence_id",
        "agentlightning.tracer.name",
    ]


def test_span_attributes_keep_their_spelling() -> None:
    assert {attribute.name: attribute.value for attribute in LightningSpanAttributes} == {
        "REWARD": "agentlightning.reward",
        "LINK": "agentlightning.link",
        "TAG": "agentlightning.tag",
        "MESSAGE_BODY": "agentlightning.message.body",
        "OBJECT_TYPE": "agentlightning.object.type",
        "OBJECT_LITERAL": "agentlightning.object.literal",
        "OBJECT_JSON": "agentlightning.object.json",
        "OPERATION_NAME": "agentlightning.operation.name",
        "OPERATION_INPUT": "agentlightning.operation.input",
        "OPERATION_OUTPUT": "agentlightning.operation.output",
    }


def test_attributes_of_rewards_are_the_fields_of_the_reward_model() -> None:
    assert [attribute.value for attribute in RewardAttributes] == list(RewardPydanticModel.model_fields)


def test_attributes_of_links_are_the_fields_of_the_link_model() -> None:
    assert [attribute.value for attribute in LinkAttributes] == list(LinkPydanticModel.model_fields)
