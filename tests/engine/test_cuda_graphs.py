"""What makes sampling on a GPU fast: norms in one kernel, shapes that return, passes that are captured."""

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
transformers = pytest.importorskip("transformers", reason="Hugging Face models need transformers: the extra hf")

from agentlightning.engine.hf_cache import (  # noqa: E402
    GRAPHED_TOKENS,
    ReadShape,
    SlotCache,
    StepShape,
)
from agentlightning.engine.hf_kernels import CudaGraphs, fuse_norms  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_norms_compute_the_same_with_the_same_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).to(dtype).eval()
    for weight in network.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    ids = torch.randint(0, 64, (3, 17))
    with torch.no_grad():
        before, weights = network(ids).logits, dict(network.named_parameters())
        fuse_norms(network)
        after = network(ids).logits

    assert sum(isinstance(module, torch.nn.RMSNorm) for module in network.modules()) == 2 * 4 + 1
    assert {name: id(weight) for name, weight in network.named_parameters()} == {n: id(w) for n, w in weights.items()}
    assert (after - before).abs().max() <= 10 * torch.finfo(dtype).eps * before.abs().max()


def test_a_norm_that_computes_something_else_stays() -> None:
    network = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)).eval()

    fuse_norms(network)

    assert not any(isinstance(module, torch.nn.RMSNorm) for module in network.modules())


def test_without_a_gpu_passes_are_run_as_they_are() -> None:
    graphs = CudaGraphs(torch.device("cpu"))
    calls = []

    results = [graphs.run("key", torch.tensor([n]), lambda given: calls.append(1) or given * 2) for n in range(3)]

    assert [int(one) for one in results] == [0, 2, 4]
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("rows", "tokens", "start", "expected"),
    [
        (1, 5, None, (1, 32, 0)),
        (3, 33, None, (4, 64, 0)),
        (5, 40, 100, (8, 64, 256)),
        (1, 900, 50, (1, 1000, 1000)),
        (70, 70, None, (70, 70, 0)),
    ],
    ids=["short", "rows", "continued", "up-to-the-length", "too-large"],
)
def test_reads_are_padded_to_few_sizes(
    rows: int, tokens: int, start: int | None, expected: tuple[int, int, int]
) -> None:
    cache = SlotCache(128, 1000, layers=1)
    starts = None if start is None else torch.full((rows,), start)

    shape = ReadShape.of(torch.zeros(rows, tokens, dtype=torch.long), starts, cache, is_graphed=True)

    assert (shape.rows, shape.tokens, shape.reads) == expected
    assert shape.is_small == (shape.rows * shape.tokens <= GRAPHED_TOKENS)


def test_steps_have_few_sizes_and_padding_goes_to_the_spare_slot() -> None:
    cache = SlotCache(100, 1000, layers=1)
    shapes = {n: StepShape.of(torch.tensor([300] * n), cache, is_graphed=True) for n in range(1, 101)}

    assert sorted({shape.rows for shape in shapes.values()}) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert all(shape.rows >= n for n, shape in shapes.items())
    assert {shape.reads for shape in shapes.values()} == {512}
    packed = shapes[3].packed(torch.tensor([7, 8, 9]), torch.tensor([1, 2, 3]), spare_slot=100)
    assert packed.tolist() == [[7, 8, 9, 0], [1, 2, 3, 0], [0, 1, 2, 100]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_pass_gives_what_the_pass_itself_gives() -> None:
    graphs = CudaGraphs(torch.device("cuda"))
    table = torch.arange(100, device="cuda") * 3

    results = [graphs.run("key", torch.tensor([n, n + 1]), lambda given: table[given]).tolist() for n in range(5)]
    graphs.forget()
    results += [graphs.run("key", torch.tensor([n, n + 1]), lambda given: table[given]).tolist() for n in range(5)]

    assert results == [[3 * n, 3 * n + 3] for n in range(5)] * 2
    assert graphs.is_enabled
