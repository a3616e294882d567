"""Packed rows, which hold several documents, without a mask of positions x positions.

Packed batches (transformers' DataCollatorWithFlattening, TRL's packing and padding_free) have
position_ids that restart. transformers turns these into a mask, [1, 1, T, T] for a row of T tokens.
We give the layers the documents' bounds instead (`kernels/document_bounds.py`), and fused attention
takes those. Layers without attention get a number for each token's document (`mixer_layer.py`). For
the loss, padded batches become packed ones without the padding. In a graph, where shapes are fixed,
a row's padding becomes a separate document.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from fused_mlp.launching import is_capturing
from fused_mlp.utils import compute_dtype

from ..foreign.hooks import has_hooks
from ..foreign.originals import why_replaced
from ..foreign.ownership import fused_parts_of
from ..foreign.versions import class_forward, is_checkpointed
from ..forwards.attend import has_sinks, rotates, why_not_sdpa, window_of
from ..forwards.attention import fits_buffers, output_of, read_qkv
from ..forwards.layer_reading import takes_attention
from ..forwards.linear import read_output
from ..forwards.mixer_layer import check_apart, keeps_apart
from ..kernels.causal_attention import fits_heads
from ..kernels.document_bounds import documents_of, is_documents, seq_idx_of
from ..loss.label_check import IGNORED
from ..reading.known import known_form
from ..reading.projection import why_call
from ..reading.refusal import attempt, refuse_documents
from ..reading.site import having, unfused
from ..step.graphed_module import is_graphed
from ..step.masks import padding_seen
from ..telling import warn
from ..weights.borders import borders_of

# the parts of the forward of a decoder, and of a mixer, that keeps documents apart
DOCUMENTS = frozenset({"documents"})
IN_NO_VOCABULARY = -1  # a label
LAYER_INPUTS = "per_layer_inputs"  # Gemma 4's, [batch, positions, layers, features]
PACKED_NO_CACHE = (
    "packed rows fill no cache, with which transformers would mix their documents: set "
    "model.config.use_cache to False"
)
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")


def decoders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for norm in ("norm", "embedding_norm"):
        yield from having(model, "embed_tokens", "layers", norm)


def decoder_forward(
    decoder: Any,
    parts: frozenset[str],
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values=None,
    **options,
):
    """Run the class's forward, with the bounds of documents as the mask of packed rows.

    As in transformers, rows are packed if position_ids restart. The host waits for the device to
    see that, as it does there. In a graph it cannot, so any position_ids count as packed. Attention
    with sinks gets bounds for full rows too (`_bounds_of_rows`). Layers without attention are given
    `seq_idx`, a number for each token's document.

    A call that is given a cache and needs no gradients, as those of generate(), runs unfused. To
    decode one token takes the host as long in parts, and 4-bit weights have faster kernels for it.

    Raises:
        ValueError: the batch is empty, or a layer would mix the documents of packed rows.
    """
    check_not_empty(decoder, {"input_ids": input_ids, **options})
    is_generating = past_key_values is not None and not torch.is_grad_enabled()
    batch: Any = next((t for t in (input_ids, options.get("inputs_embeds")) if t is not None), None)
    asked, documents = options.get("use_cache"), None
    mixing = [layer for layer in decoder.layers if not _attends(layer)]
    if batch is not None and past_key_values is None and asked is not True:
        if mixing and position_ids is None:
            position_ids = _positions_given(options, batch)
        documents = _documents_in(decoder, batch, attention_mask, position_ids, bool(mixing))
    if documents is not None:
        if fills_cache(decoder, asked):
            warn(PACKED_NO_CACHE)
            options["use_cache"] = False
        for layer in mixing:
            check_apart(layer)
        if mixing:
            options["seq_idx"] = seq_idx_of(documents).contiguous()
        if attention_mask is None:
            attention_mask = _mask_of_packed(decoder, documents)
    elif (
        batch is not None
        and past_key_values is None
        and not fills_cache(decoder, asked)
        and have_sinks(decoder)
    ):
        attention_mask = _bounds_of_rows(decoder, batch, attention_mask)
    with unfused() if is_generating else nullcontext():
        return class_forward(
            decoder, input_ids=input_ids, attention_mask=attention_mask,
            position_ids=position_ids, past_key_values=past_key_values, **options,
        )  # fmt: skip


def _documents_in(
    decoder: Any, batch: Tensor, mask: Any, position_ids: Any, has_mixers: bool
) -> Tensor | None:
    """Return the documents of packed rows, None for rows that are not packed."""
    if mask is not None:
        return mask if isinstance(mask, Tensor) and is_documents(mask) else None
    if not isinstance(position_ids, Tensor):
        return None
    if has_mixers and position_ids.ndim == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]  # the text's, before those of images
    # in Qwen-VL a position has several numbers: text, height and width
    has_axes = "mrope_section" in (getattr(decoder.config, "rope_parameters", None) or {})
    if position_ids.ndim != 2 or (has_axes and not has_mixers):
        return None
    documents = documents_of(position_ids.expand(len(batch), -1))
    is_packed = is_capturing(position_ids) or bool(documents[:, :, 0].any())
    return documents if is_packed else None


def _mask_of_packed(decoder: Any, documents: Tensor) -> Tensor | None:
    """Return the mask of packed rows: the documents, or None where transformers makes one."""
    if takes_documents(decoder):
        return documents
    if decoder.config._attn_implementation in ("eager", "sdpa"):  # else they need no mask
        for layer in filter(_attends, decoder.layers):
            form = known_form(layer.self_attn, "Attention")
            if form is not None and not form.separates_documents:
                reason = "not all attention runs fused, and transformers' mask has none"
                refuse_documents(layer.self_attn, reason)
    return None


def _positions_given(options: dict[str, Any], batch: Tensor) -> Tensor | None:
    """Return each token's position in its document, if a call tells the documents without."""
    seq_idx, bounds = options.get("seq_idx"), options.get("cu_seq_lens_q")
    place = torch.arange(batch.shape[1], device=batch.device)
    if isinstance(seq_idx, Tensor):
        return place - seq_idx_of(documents_of(place + 2 * len(place) * seq_idx))
    if isinstance(bounds, Tensor):
        return (place - bounds[torch.searchsorted(bounds, place, right=True) - 1])[None]
    return None


def _attends(layer: Any) -> bool:
    return "self_attn" in layer._modules


def have_sinks(decoder: Any) -> bool:
    """Return True for a decoder whose attention has sinks."""
    return any(has_sinks(layer.self_attn) for layer in decoder.layers if _attends(layer))


def _bounds_of_rows(decoder: Any, batch: Tensor, mask: Any) -> Any:
    """Return documents for a batch [batch, positions, ...] without padding, a row each. Return the
    mask as it is if there is padding, which the host waits to see, or if attention takes no
    documents.
    """
    if mask is not None:
        is_of_tokens = isinstance(mask, Tensor) and mask.shape == batch.shape[:2]
        if not is_of_tokens or is_capturing(mask):
            return mask
    if not takes_documents(decoder) or not (mask is None or bool(mask.all())):
        return mask
    return _padding_apart(torch.ones(batch.shape[:2], dtype=torch.bool, device=batch.device))


def check_not_empty(module: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise ValueError for a batch without rows or tokens."""
    for name in ("input_ids", "inputs_embeds"):
        rows = inputs.get(name)
        if isinstance(rows, Tensor) and 0 in rows.shape[:2]:
            raise ValueError(
                f"a fused {type(module).__name__} needs a batch with tokens, got {name} "
                f"{list(rows.shape)}: skip empty batches"
            )


def takes_documents(decoder: Any) -> bool:
    """Return True if all attention of a decoder runs fused, on kernels that handle documents, and
    its other layers keep documents apart. An attention that steps aside turns them into a mask."""
    its_module = vars(sys.modules[type(decoder).__module__])
    makes_own_masks = why_replaced(masking_utils.__name__, *MASKS) is None and all(
        its_module.get(name) in (None, getattr(masking_utils, name)) for name in MASKS
    )
    dtype = compute_dtype(decoder.embed_tokens.weight)
    return makes_own_masks and all(_attends_fused(layer, dtype) for layer in decoder.layers)


def _attends_fused(layer: Any, dtype: torch.dtype) -> bool:
    if not _attends(layer):
        return keeps_apart(layer)
    attention = layer.self_attn
    wanted = {"attention", "rope"} if rotates(attention) else {"attention"}
    borders = borders_of(layer)
    is_fused = borders is not None or wanted <= fused_parts_of(attention)
    if not is_fused or why_not_sdpa(attention) or not fits_heads(dtype, attention.head_dim):
        return False
    # else it attends as transformers does, with a mask of positions x positions
    if borders is not None:
        return takes_attention(layer, borders.kind)
    qkv, reason = attempt(read_qkv, attention)
    o, no_output = attempt(read_output, output_of(attention))
    if reason or no_output or not qkv.are_all:
        return False
    return fits_buffers(attention, [*qkv.fit, o], dtype)


def unpadded(decoder: Any, inputs: dict[str, Any], labels: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return a padded batch as one row [1, tokens] without its padding. Return the batch itself if
    it has no padding or the result would not be exact. The host waits for the number of tokens.

    inputs: the decoder's arguments by name. labels: [batch, positions], each at the token that
    predicts it. The result is exact if no padding predicts a label and no cache is filled, with
    a shorter window if none lies between tokens, and if padding does not change RoPE.

    The graph of a `GraphedStep` has one shape, so its batch keeps the padding and has documents as
    its mask. This needs eager calls that saw padding, none of it predicting a label or lying
    between a row's tokens. If a later row breaks that, its labels make the loss NaN, because the
    host cannot look.
    """
    mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    given = {name: inputs.get(name) for name in ("input_ids", "inputs_embeds", LAYER_INPUTS)}
    tokens = {name: rows for name, rows in given.items() if rows is not None}
    if (
        not hasattr(decoder, "layers")  # a multimodal model: its decoder is inside
        or has_hooks(decoder)  # which may read the shape of its output
        or not isinstance(mask, Tensor)
        or mask.is_floating_point()
        or any(token.shape[:2] != mask.shape for token in (labels, *tokens.values()))
        or (position_ids is not None and position_ids.ndim != 2)
        or inputs.get("past_key_values") is not None
        or fills_cache(decoder, inputs.get("use_cache"))
        or not takes_documents(decoder)
    ):
        return inputs, labels
    is_token = mask.bool().to(labels.device)
    is_predicting = ~is_token & (labels != IGNORED)
    seen = padding_seen()
    if is_capturing(mask):
        if seen is None or not ((seen.is_there or have_sinks(decoder)) and seen.is_apart):
            return inputs, labels
        wrong = is_predicting.any(1, keepdim=True) | _is_parted(is_token)
        labels = labels.masked_fill(wrong & (labels != IGNORED), IN_NO_VOCABULARY)
        return inputs | {"attention_mask": _padding_apart(is_token)}, labels
    places = is_token.flatten().nonzero().squeeze(1)
    is_exact, is_padded = not is_predicting.any(), len(places) < is_token.numel()
    windows = (window_of(layer.self_attn) for layer in decoder.layers if _attends(layer))
    slides = any(window is not None and window < mask.shape[1] for window in windows)
    place_matters = seen is not None or is_graphed(decoder) or slides
    is_parted = is_padded and place_matters and bool(_is_parted(is_token).any())
    if seen is not None:
        seen.is_there |= is_padded
        seen.is_apart &= is_exact and not is_parted
    if is_graphed(decoder) and is_exact and not is_parted:
        return inputs | {"attention_mask": _padding_apart(is_token)}, labels
    if is_parted and slides:  # transformers' window counts the padding
        return inputs, labels
    if not len(places) or not is_padded or not is_exact or is_graphed(decoder):
        return inputs, labels
    if _padding_changes_angles(decoder.config, mask.shape[1], position_ids):
        return inputs, labels

    if "inputs_embeds" not in tokens and why_call(decoder.embed_tokens):
        # a hook may read the batch's shape, as NEFTune's does to scale its noise
        ids, inputs = inputs["input_ids"], inputs | {"input_ids": None}
        tokens = {"inputs_embeds": decoder.embed_tokens(ids)}
        if getattr(decoder, "hidden_size_per_layer_input", 0):  # Gemma 4's, also of ids
            tokens[LAYER_INPUTS] = decoder.get_per_layer_inputs(ids, None)

    def picked(rows: Tensor) -> Tensor:
        return rows.flatten(0, 1).index_select(0, places.to(rows.device))[None]

    if position_ids is None:
        position_ids = torch.arange(mask.shape[1], device=places.device)[None]
    row = places // mask.shape[1]
    since_first = torch.arange(len(places), device=places.device) - torch.searchsorted(row, row)
    found = {name: picked(rows) for name, rows in tokens.items()}
    found["position_ids"] = picked(position_ids.expand(is_token.shape))
    found["attention_mask"] = documents_of(since_first[None])
    return inputs | found, picked(labels)


def _padding_changes_angles(config: Any, length: int, position_ids: Tensor | None) -> bool:
    """Return True if RoPE's angles depend on the longest row, and padding may make it too long."""
    found = getattr(config, "rope_parameters", None) or {}
    # each kind of layer may have its own
    kinds = [one for one in found.values() if isinstance(one, dict)] or [found]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    if not limits:
        return False
    return (length if position_ids is None else int(position_ids.max()) + 1) > min(limits)


def _padding_apart(is_token: Tensor) -> Tensor:
    """Return documents whose bounds are where tokens and padding meet."""
    positions = is_token.shape[1]
    return documents_of(torch.arange(positions, device=is_token.device) + 2 * positions * is_token)


def _is_parted(is_token: Tensor) -> Tensor:
    """Return, for each row [batch, 1], whether padding lies between its tokens."""
    begins = is_token[:, 1:] & ~is_token[:, :-1]
    return begins.sum(1, keepdim=True) + is_token[:, :1] > 1


def fills_cache(decoder: Any, use_cache: bool | None) -> bool:
    """Return True if a forward called with this use_cache fills a cache."""
    if use_cache is None:  # a multimodal model leaves it to its text config
        use_cache = getattr(decoder.config, "use_cache", False)
    return bool(use_cache) and not is_checkpointed(decoder)
