"""Any causal language model of transformers, from a local folder, behind the engine's and the trainer's interface.

Attention is torch's own (SDPA). With LoRA the model trains adapters. Its weights are those beneath with the adapters
merged in 32 bits, so that what samples from them needs to know nothing of adapters; these alone are there as well.
"""

import functools
import importlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from agentlightning.engine import hf_kernels
from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.hf_cache import CachePass, ReadShape, SlotCache, StepShape
from agentlightning.engine.hf_codec import HfChatCodec, end_ids_of
from agentlightning.engine.model import AdapterWeights, CausalModel, LoraOptions
from agentlightning.engine.weights import copy_weights, round_by_chance
from agentlightning.errors import EngineError
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonObject

logger = logging.getLogger(__name__)

_BASE_LAYER: Final = ".base_layer"
_SAME: Final = 1e-3
"""How far the logits of two ways through the model may differ, of their largest."""


class HfModel:
    """A `CausalModel` around a model of transformers."""

    shares_prefixes = True

    def __init__(self, network: Any, *, name: str, end_ids: frozenset[int], lora: LoraOptions | None = None) -> None:
        config = network.config.get_text_config() if hasattr(network.config, "get_text_config") else network.config
        self.name = name
        self.vocab_size = int(config.vocab_size)
        # Some models do not say how far they can read.
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 4096)
        window = getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):  # up to it, such a model attends to everything
            self.max_length = min(self.max_length, int(window))
        self.end_ids = end_ids
        self._layers = int(config.num_hidden_layers)
        if network.device.type == "cuda":  # elsewhere it would be no faster
            hf_kernels.fuse_norms(network)
        self.network = network if lora is None else _with_adapters(network, lora)
        self.has_adapters = lora is not None
        self._plain = network
        """Without peft's cover; with adapters, its layers are those that have them."""
        self._has_plain_head = _has_plain_head(network)
        self._graphs = hf_kernels.CudaGraphs(self.device)
        self.train_mode(enabled=False)

    @property
    def device(self) -> torch.device:
        return cast("torch.device", self._plain.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast("torch.dtype", self._plain.dtype)

    # ------------------------------------------------------------------ sampling

    def new_cache(self, slots: int, length: int) -> SlotCache:
        self._graphs.forget()
        hf_kernels.use_groups(self._plain)
        return SlotCache(slots, length, layers=self._layers)

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: SlotCache, slots: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        shape = ReadShape.of(ids, starts, cache, is_graphed=self._graphs.is_enabled)
        self._make_room(cache, int(slots.max()) + 1, max(shape.reads, shape.tokens))
        inputs = shape.packed(ids, lengths, slots, starts, spare_slot=cache.spare_slot)
        compute = functools.partial(self._read, cache, shape)
        logits = self._graphs.run(shape, inputs, compute) if shape.is_small else compute(inputs.to(self.device))
        return logits[: len(lengths)]

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache, n: int) -> Tensor:
        shape = StepShape.of(positions, cache, is_graphed=self._graphs.is_enabled)
        self._make_room(cache, shape.rows, shape.reads)
        inputs = shape.packed(tokens, positions, spare_slot=cache.spare_slot)
        return self._graphs.run(shape, inputs, functools.partial(self._step, cache, shape))[:n]

    def move(self, cache: SlotCache, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        self._make_room(cache, max(targets) + 1, length)
        both = torch.tensor([list(sources), list(targets)]).to(self.device)
        cache.move(both[0], both[1], length)

    def _make_room(self, cache: SlotCache, slots: int, length: int) -> None:
        moves = cache.moves
        cache.make_room(slots, length)
        if cache.moves != moves:
            self._graphs.forget()

    def _read(self, cache: SlotCache, shape: ReadShape, inputs: Tensor) -> Tensor:
        ids, lengths, slots, starts = shape.parts(inputs)
        columns = torch.arange(shape.tokens, device=self.device)
        positions = starts[:, None] + columns
        is_prompt = columns < lengths[:, None]
        targets = torch.where(is_prompt, slots[:, None], cache.spare_slot)
        mask = None
        if shape.reads:
            mask = (torch.arange(shape.reads, device=self.device) <= positions[:, :, None])[:, None]
        written = torch.where(is_prompt, positions, columns)
        cache.begin(CachePass(targets, written, slots if shape.reads else None, shape.reads))
        return self._logits_after(ids, lengths - 1, mask, positions, cache)

    def _step(self, cache: SlotCache, shape: StepShape, inputs: Tensor) -> Tensor:
        tokens, positions, slots = inputs.view(3, shape.rows, 1).unbind()
        mask = (torch.arange(shape.reads, device=self.device) <= positions)[:, None, None]
        cache.begin(CachePass(slots, positions, shape.rows, shape.reads))
        return self._logits_after(tokens, None, mask, positions, cache)

    def _logits_after(
        self, ids: Tensor, last: Tensor | None, mask: Tensor | None, positions: Tensor, cache: SlotCache
    ) -> Tensor:
        """The logits after one token of each row: the one at `last`, or the only one."""
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        if self._has_plain_head:
            found = self._plain.base_model(input_ids=ids, **options).last_hidden_state
        else:
            found = self._plain(input_ids=ids, **options).logits
        found = found[:, 0] if last is None else found[torch.arange(len(last), device=self.device), last]
        return cast("Tensor", self._plain.get_output_embeddings()(found) if self._has_plain_head else found)

    # ------------------------------------------------------------------ training

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        """As `CausalModel` says; padding on the right is hidden by causality alone."""
        options: JsonObject = {"use_cache": False}
        if len(attention_lengths) > len(ids):
            options |= hf_kernels.row_arguments(attention_lengths.tolist(), ids.device)
        if not self._has_plain_head:
            return cast("Tensor", self._plain(input_ids=ids, **options).logits[selected])
        states = self._plain.base_model(input_ids=ids, **options).last_hidden_state[selected]
        return cast("Tensor", states if self._is_head_apart() else self._plain.get_output_embeddings()(states))

    def head(self) -> Tensor | None:
        """The output embeddings; None where the model scales its logits, adds to them, or has adapters there."""
        if not self._is_head_apart():
            return None
        return cast("Tensor", self._plain.get_output_embeddings().weight)

    def _is_head_apart(self) -> bool:
        last = self._plain.get_output_embeddings()
        return self._has_plain_head and type(last) is nn.Linear and last.bias is None

    def bytes_kept(self, *, is_checkpointed: bool) -> float:
        """About how much memory the backward pass needs of a token: inputs and outputs of products.

        With checkpoints these are the products of one layer, and the input of every layer besides.
        """
        head = self._plain.get_output_embeddings()
        products = [one for one in self.network.modules() if isinstance(one, nn.Linear) and one is not head]
        widths = self.dtype.itemsize * sum(product.in_features + product.out_features for product in products)
        if not is_checkpointed:
            return widths
        width = self.dtype.itemsize * int(self._plain.get_input_embeddings().weight.shape[-1])
        return widths / self._layers + self._layers * width

    def checkpoint_gradients(self) -> bool:
        """In training, keep of a layer its input alone, and compute the rest again when gradients need it.

        False, and nothing changed, if the layers of this model cannot.
        """
        if not self._plain.supports_gradient_checkpointing:
            return False
        # Without reentrance, the first layer's input needs no gradient of its own where adapters alone are trained.
        self._plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    def pack_rows(self) -> bool:
        """Prepare `hidden` for rows end to end; False, and nothing changed, if this model does not compute the same so.

        Two short rows are tried both ways, since models of transformers differ in what they make of positions.
        """
        before = self._plain.config._attn_implementation
        lengths = torch.tensor([4, 3], device=self.device)
        padded = torch.tensor([[1, 2, 3, 1], [2, 1, 3, 0]], device=self.device)
        is_token = torch.arange(4, device=self.device) < lengths[:, None]
        try:
            hf_kernels.register_packed()
            self._plain.set_attn_implementation(hf_kernels.PACKED)
            with torch.no_grad():
                whole = self.hidden(padded, lengths, is_token)
                packed = padded[is_token][None]
                found = self.hidden(packed, lengths, torch.ones_like(packed, dtype=torch.bool))
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            logger.info("Rows of model '%s' are padded, for they cannot be packed: %s", self.name, error)
        else:
            is_short = self.dtype.itemsize == 2 or torch.is_autocast_enabled(self.device.type)
            bound = 2e-2 if is_short else _SAME
            if (whole - found).abs().max() <= bound * whole.abs().max():
                return True
            logger.info("Rows of model '%s' are padded, for packed ones give other results.", self.name)
        self._plain.set_attn_implementation(before)
        return False

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under the name it has without adapters; those with an adapter have it merged, in 32 bits.

        The sum of a 16-bit weight and a small adapter is not one of 16 bits: it would be the weight again.
        """
        layers = dict(self._plain.named_modules())
        for name, parameter in self._plain.named_parameters():
            if _is_adapter(name):
                continue
            owner, _, kind = name.rpartition(".")
            weight = parameter.detach()
            if owner.endswith(_BASE_LAYER) and kind == "weight":
                layer = layers[owner.removesuffix(_BASE_LAYER)]
                with torch.no_grad():
                    weight = sum((layer.get_delta_weight(one).float() for one in layer.active_adapters), weight.float())
            yield name.replace(_BASE_LAYER, ""), weight

    def adapters(self) -> AdapterWeights | None:
        """The adapters alone, as peft saves them; None without."""
        if not self.has_adapters:
            return None
        peft: Any = importlib.import_module("peft")
        tensors = peft.get_peft_model_state_dict(self.network, save_embedding_layers=False)
        options = {**self.network.peft_config["default"].to_dict(), "inference_mode": True}
        config = {name: sorted(value) if isinstance(value, set) else value for name, value in options.items()}
        return AdapterWeights({name: tensor.detach() for name, tensor in tensors.items()}, config)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._published().items()}

    def _published(self) -> dict[str, nn.Parameter]:
        """The weights beneath the adapters, under the names of the checkpoint."""
        return {
            name.replace(_BASE_LAYER, ""): parameter
            for name, parameter in self._plain.named_parameters()
            if not _is_adapter(name)
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over another's weights, rounded to the model's own dtype; adapters begin anew.

        EngineError, and nothing changed, when they do not fit.
        """
        copy_weights(tensors, self._published())
        with torch.no_grad():
            for name, parameter in self._plain.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()

    def train_mode(self, enabled: bool, *, dropout: bool = True) -> None:
        self.network.train(enabled)
        for module in self.network.modules() if enabled and not dropout else ():
            if isinstance(module, torch.nn.Dropout):
                module.eval()

    def save(self, folder: Path) -> None:
        """Write a folder that transformers loads, with every weight as exact as it is here; adapters are merged."""
        state = {name: tensor.contiguous() for name, tensor in self.state().items()}
        with _without_progress_bars(importlib.import_module("transformers")):
            self._plain.save_pretrained(folder, state_dict=state, safe_serialization=True)
        if self.has_adapters:  # merged weights have 32 bits, and the dtype that is noted here would round them
            config = folder / "config.json"
            noted = json.loads(config.read_text(encoding="utf-8"))
            noted |= {name: "float32" for name in ("dtype", "torch_dtype") if name in noted}
            config.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_hf(
    folder: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    gguf_file: str | None = None,
    lora: LoraOptions | None = None,
    is_trained: bool = False,
) -> tuple[CausalModel, ChatCodec]:
    """The model and the tokenizer of a folder; nothing is downloaded, and no code of the folder is run.

    Args:
        is_trained: Whether it comes from a training, so that its weights differ by little from those of 16 bits from
            which that began; they are rounded by chance, or the difference would be lost.
    """
    transformers: Any = importlib.import_module("transformers")
    where: JsonObject = {"local_files_only": True}
    how: JsonObject = {"dtype": torch.float32 if is_trained else dtype, "attn_implementation": "sdpa"}
    if gguf_file is not None:
        where["gguf_file"] = gguf_file
        packing = getattr(transformers, "GgufConfig", None)
        if packing is not None:  # this version would leave the weights packed, which cannot be trained
            how["quantization_config"] = packing(dequantize=True)
    try:
        with _without_progress_bars(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
            network = transformers.AutoModelForCausalLM.from_pretrained(folder, **how, **where)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(f"The folder '{folder}' holds no model that transformers can load: {error}") from error
    quantizer = getattr(network, "hf_quantizer", None)
    if gguf_file is not None and quantizer is not None:
        quantizer.remove_quantization_config(network)  # the weights are plain now, and are saved as such
    if is_trained:
        round_weights(network, dtype)
    network = network.to(device)
    shown = Path(name).name or name
    model = HfModel(network, name=shown, end_ids=end_ids_of(tokenizer, network.generation_config), lora=lora)
    return model, HfChatCodec(tokenizer, end_ids=model.end_ids)


def round_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Round every weight by chance, always the same way."""
    for name, parameter in network.named_parameters():
        parameter.data = round_by_chance(parameter.data, dtype, seed=name)


@contextmanager
def _without_progress_bars(transformers: Any) -> Iterator[None]:
    """They would fill the log of a server, and break the view of a training."""
    logging = transformers.utils.logging
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def _with_adapters(network: Any, lora: LoraOptions) -> Any:
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise EngineError(f"LoRA needs the package peft: run `{install_command('train', 'hf')}`.") from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(network, options)
    # An adapter of a weight that another layer shares cannot be merged: the other would change as well.
    names = {name for name, _ in network.named_parameters()}
    for name, layer in network.named_modules():
        if hasattr(layer, "get_delta_weight") and f"{name}{_BASE_LAYER}.weight" not in names:
            raise EngineError(
                f"The layer '{name}' shares its weights with another, so that no adapter of it can be merged; leave it "
                "out of the targets of LoraOptions."
            )
    return adapted


def _is_adapter(name: str) -> bool:
    return "lora_" in name


def _has_plain_head(network: Any) -> bool:
    """Whether the logits are the output embeddings of the last hidden state and no more; some models scale them."""
    head = network.get_output_embeddings()
    if head is None or network.base_model is network:
        return False
    ids = torch.tensor([[1, 2, 3]], device=network.device)
    network.eval()
    with torch.no_grad():
        whole = network(input_ids=ids, use_cache=False).logits
        short = head(network.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return bool(whole.shape == short.shape and (whole - short).abs().max() <= _SAME * whole.abs().max())
