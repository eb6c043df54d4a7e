"""The fixtures of the simulated model, for its own tests."""

from tests.simulated_model.fixtures import simulated_model as simulated_model
