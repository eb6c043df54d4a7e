"""Log-probabilities in chunks: equal to those of whole logits, gradients too, and within the promised memory."""

import pytest
import torch
from torch import Tensor

from agentlightning.algorithm.grpo.token_logprobs import TokenLogprobs, token_logprobs
from tests.algorithm.grpo.peaks import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 7
EPSILON = {torch.float64: 1e-12, torch.float32: 1e-6}


def whole(logits: Tensor, chosen: Tensor, temperatures: Tensor | None) -> TokenLogprobs:
    """As one would write it down, with everything held at once."""
    scaled = logits if temperatures is None else logits / temperatures.to(logits.dtype)[:, None]
    table = scaled.log_softmax(-1)
    return TokenLogprobs(table.gather(-1, chosen[:, None]).squeeze(-1), -(table.exp() * table).sum(-1))


class Case:
    """Hidden states, a head and chosen tokens, the same each time."""

    def __init__(self, dtype: torch.dtype, *, count: int = 23, width: int = 6, vocabulary: int = 40) -> None:
        source = torch.Generator().manual_seed(3)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()

        self.hidden, self.weight = tensor(count, width), tensor(vocabulary, width)
        self.chosen = torch.randint(vocabulary, (count,), generator=source)
        self.temperatures = torch.rand(count, generator=source, dtype=torch.float64) + 0.5
        self.slopes, self.entropy_slopes = (torch.randn(count, generator=source, dtype=torch.float64) for _ in range(2))

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T

    def gradients(self, found: TokenLogprobs, *, entropy: bool) -> list[Tensor]:
        value = (found.logprobs * self.slopes).sum()
        if entropy:
            value = value + (found.entropies * self.entropy_slopes).sum()
        return list(torch.autograd.grad(value, [self.hidden, self.weight]))


def assert_same(own: Tensor, theirs: Tensor) -> None:
    """Up to rounding, relative to the largest of them."""
    bound = EPSILON[theirs.dtype] * max(1.0, theirs.abs().max().item())
    torch.testing.assert_close(own, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_warm", [False, True], ids=["at 1", "temperatures"])
@pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("rows", [1, CHUNK, 1000])
def test_values_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, is_warm: bool, entropy: bool, rows: int
) -> None:
    case = Case(dtype)
    temperatures = case.temperatures if is_warm else None
    size = rows * 40 * dtype.itemsize

    expected = whole(case.logits, case.chosen, temperatures)
    found = token_logprobs(
        case.hidden,
        case.chosen,
        temperatures,
        head=case.weight,
        entropy_gradient=entropy,
        chunk_bytes=size,
    )
    of_logits = token_logprobs(case.logits, case.chosen, temperatures, entropy_gradient=entropy, chunk_bytes=size)

    gradients = case.gradients(expected, entropy=entropy)
    for one in (found, of_logits):
        assert_same(one.logprobs, expected.logprobs)
        assert_same(one.entropies, expected.entropies)
        for own, theirs in zip(case.gradients(one, entropy=entropy), gradients, strict=True):
            assert_same(own, theirs)


def test_entropies_have_a_gradient_only_where_it_is_wanted() -> None:
    case = Case(torch.float64)

    plain, wanted = (
        token_logprobs(case.hidden, case.chosen, head=case.weight, entropy_gradient=entropy)
        for entropy in (False, True)
    )

    assert not plain.entropies.requires_grad
    assert wanted.entropies.requires_grad


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    case = Case(torch.float64)
    token_logprobs(case.hidden, case.chosen, head=case.weight.detach()).logprobs.sum().backward()
    assert case.hidden.grad is not None
    assert case.weight.grad is None


def test_autocast_decides_the_dtype_of_the_head_and_not_that_of_the_results() -> None:
    case = Case(torch.float32)
    logits = (case.hidden.bfloat16() @ case.weight.bfloat16().T).float()

    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(case.hidden, case.chosen, head=case.weight)

    torch.testing.assert_close(found.logprobs, whole(logits, case.chosen, None).logprobs)
    assert [one.dtype for one in case.gradients(found, entropy=False)] == [torch.float32] * 2


def test_a_token_that_cannot_be_chosen_leaves_values_and_gradients_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)

    found = token_logprobs(logits, torch.tensor([1]), entropy_gradient=True)
    (found.logprobs + found.entropies).sum().backward()

    assert logits.grad is not None
    assert bool(found.entropies.isfinite().all() and logits.grad.isfinite().all())


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_take_little_more_than_one_chunk(dtype: torch.dtype, entropy: bool) -> None:
    count, width, vocabulary, rows = 256, 4, 5000, 32
    case = Case(torch.float32, count=count, width=width, vocabulary=vocabulary)
    hidden, weight = (one.detach().to(dtype).requires_grad_() for one in (case.hidden, case.weight))
    chunk = rows * vocabulary * 4
    results = 4 * (3 * count) + 4 * 2 * (count * width + vocabulary * width)  # gradients, in and out of 32 bits

    def work() -> list[Tensor]:
        found = token_logprobs(
            hidden, case.chosen, case.temperatures, head=weight, entropy_gradient=entropy, chunk_bytes=chunk
        )
        return list(torch.autograd.grad((found.logprobs + found.entropies).sum(), [hidden, weight]))

    assert 0.7 * chunk <= peak_bytes(work) - results <= 1.2 * chunk
    naive = peak_bytes(lambda: whole((hidden @ weight.T).float(), case.chosen, None))
    assert naive > 3 * count / rows * chunk  # which shows that it is measured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])
def test_on_a_gpu_it_takes_little_more_than_one_chunk(entropy: bool) -> None:
    count, width, vocabulary, chunk = 4096, 64, 150_000, 1 << 28
    hidden = torch.randn(count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    chosen = torch.randint(vocabulary, (count,), device="cuda")
    (hidden.detach() @ weight[:8].T).sum()  # so that torch's workspaces are there before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    found = token_logprobs(hidden, chosen, head=weight, entropy_gradient=entropy, chunk_bytes=chunk)
    (found.logprobs + found.entropies).sum().backward()

    results = hidden.numel() * 2 + count * 4 * 6
    assert torch.cuda.max_memory_allocated() - before - results <= 1.2 * chunk
