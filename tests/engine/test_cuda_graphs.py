"""What makes sampling on a GPU fast: norms in one kernel, shapes that return, passes that are captured."""

import pytest

from tests.optional import optional

torch = pytest.importorskip("torch", reason="the engine needs torch")
transformers = optional("transformers", reason="Hugging Face models need transformers: the extra hf")

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
