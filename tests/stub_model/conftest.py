"""The fixtures of the stub model, for its own tests."""

from tests.stub_model.fixtures import stub_model as stub_model
