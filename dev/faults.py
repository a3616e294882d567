"""Faults for `planted_faults.py`: what stands in a file, what takes its place, and the tests that
should notice: a room, and the files in it that are most likely to, which run first."""

from typing import NamedTuple


class Fault(NamedTuple):
    file: str
    text: str  # stands in the file once
    instead: str
    room: str  # of tests/
    first: str  # test_NAME.py in it, parted by spaces


# fmt: off
FAULTS = (
    # --- fused_mlp ---
    Fault("fused_mlp/swiglu.py", "silu * (1.0 - sigmoid)", "gate * (1.0 - sigmoid)", "kernels",
          "swiglu"),
    Fault("fused_mlp/geglu.py", "_SLOPE * (gate", "_CUBIC * (gate", "kernels", "contract"),
    Fault("fused_mlp/utils.py", "columns.addmm_(grad, B, beta=0, alpha=scaling)",
          "columns.addmm_(grad, B, beta=0)", "kernels", "contract"),
    Fault("fused_mlp/dropout.py", "WHOLE / keep)", "1.0)", "kernels", "dropout"),
    Fault("fused_mlp/launching.py", "type(argument), argument)", "argument, argument)", "kernels",
          "launching"),
    # --- techniques ---
    Fault("fused_lora/kernels/rotation.py", "-sin_2, -sin_1", "-sin_1, -sin_2", "kernels", "rope"),
    Fault("fused_lora/kernels/logits.py", "exp_sum * _exp(maximum - shift) + tl.sum(",
          "exp_sum + tl.sum(", "kernels", "cross_entropy_kernel"),
    Fault("fused_lora/head.py", "alpha=len(x)", "alpha=len(self._logits)", "kernels",
          "cross_entropy cross_entropy_chunks"),
    Fault("fused_lora/packing.py", "(length, 0)", "(length + 1, 0)", "adopt", "fuse_documents"),
    Fault("fused_lora/label_check.py", "most >= vocabulary", "most > vocabulary", "step",
          "graph_labels"),
    # --- kernels ---
    Fault("fused_lora/kernels/causal_attention.py", "first_key = tl.load(documents + first)",
          "first_key = block * 0", "kernels", "attention_to_documents"),
    Fault("fused_lora/kernels/causal_attention_backward.py", "p * (grad_p - dots[:, None])",
          "p * grad_p", "kernels", "causal_attention"),
    Fault("fused_lora/kernels/residual.py", "residual.to(tl.float32) + y",
          "residual.to(tl.float32) + y.to(residual.dtype).to(tl.float32)", "kernels",
          "residual_kernels launchers"),
    Fault("fused_lora/kernels/products.py", "self.scaling * self.mask.scale",
          "self.scaling", "kernels", "launchers"),
    Fault("fused_lora/kernels/dropped_products.py", "product * scales[i]", "product", "kernels",
          "launchers"),
    Fault("fused_lora/kernels/qkv_norm_rope.py", "1.0 * HEADS * HEAD_DIM)", "1.0 * HEAD_DIM)",
          "kernels", "qkv_rope launchers"),
    Fault("fused_lora/kernels/documents.py", "!= position_ids[:, :-1] + 1",
          "< position_ids[:, :-1]", "kernels", "attention_to_documents"),
    Fault("fused_lora/kernels/fp8_rows.py", "0x7FFFF + ((bits >> 20) & 1)", "0x80000", "kernels",
          "fp8_codes"),
    Fault("fused_lora/kernels/fp8_norm.py", "(grad_x + residual).to(", "grad_x.to(", "kernels",
          "fp8_codes"),
    Fault("fused_lora/kernels/fp8_products.py", "tl.ceil(tl.log2(", "tl.floor(tl.log2(", "kernels",
          "fp8_borders"),
    Fault("fused_lora/kernels/fp8_swiglu.py", "grad_hidden * activated * up_scale",
          "grad_hidden * activated * gate_scale", "kernels", "fp8_codes"),
    Fault("fused_lora/kernels/fp8_logits.py", "- SPACING / 2", "- SPACING", "kernels", "fp8_head"),
    # --- whole layers ---
    Fault("fused_lora/layer/buffer.py", "total.addmm_(extended, weight, alpha=multiplier)",
          "total.addmm_(extended, weight)", "kernels", "decoder_layer"),
    Fault("fused_lora/layer/adapter_sums.py", "gradient, scaling)]))", "gradient, 1.0)]))",
          "kernels", "decoder_layer"),
    Fault("fused_lora/kernels/fp8_rows.py", "torch.where(least > 0, least, 1.0)",
          "1e-30 + 0 * least", "adopt", "fuse_fp8"),
    # --- step ---
    Fault("fused_lora/step/recompute.py", "_set_random(now)", "pass", "step", "recompute"),
    Fault("fused_lora/step/recompute.py", "function(end < len(", "function(end <= len(", "step",
          "recompute"),
    Fault("fused_lora/step/checkpoint.py", "kept_bytes += self", "kept_bytes = self", "adopt",
          "fuse_checkpoint_memory"),
    Fault("fused_lora/step/graph.py", "else loss / self.accumulation_steps", "else loss", "step",
          "graph"),
    # --- adopt ---
    Fault("fused_lora/adopt/documents.py", "window < longest", "window < longest - 1", "adopt",
          "fuse_documents"),
    Fault("fused_lora/adopt/borders.py", "w.device, None if bias is None else bias.data_ptr()",
          "w.device, None", "adopt", "bordered"),
    Fault("fused_lora/adopt/borders.py", "block for part, block", "block + 8 for part, block",
          "adopt", "fuse_users fp8_weight"),
    Fault("fused_lora/adopt/projection.py", "not dropout.training or dropout.p == 0.0",
          "dropout.p == 0.0", "adopt", "fuse_dropout"),
    Fault("fused_lora/layer/filling.py", "if rank < block:", "if rank > block:", "adopt",
          "bordered"),
    # --- bench ---
    Fault("bench/audit.py", "WALL_SHARE * step_ms + WALL_MS", "WALL_SHARE * step_ms", "bench",
          "audit"),
    Fault("bench/floor.py", "accumulate * ms for ms", "ms for ms", "bench", "floor"),
    # --- report ---
    Fault("report/statistics.py", "ratios + [1 / ratio for ratio in ratios]", "ratios", "report",
          "summary"),
    Fault("report/comparison.py", "+ (1 - busy) / _over(*launches)", "+ (1 - busy)",
          "report", "compare"),
    # --- the root ---
    Fault("batches.py", "(IGNORED, *one.labels[1:])", "one.labels", "bench", "batches"),
    Fault("trainer.py", "else loss / self.accumulate)", "else loss)", "bench", "trainer"),
    # --- twenty that were not looked at while the cases of `make test` were chosen ---
    Fault("fused_mlp/fast_lora.py", "x if need_gate_A or need_up_A else None",
          "x if need_gate_A else None", "kernels", "contract_autograd"),
    Fault("fused_mlp/dropout.py", "max(round((1.0 - dropout) * WHOLE), 1)",
          "round((1.0 - dropout) * WHOLE)", "kernels", "dropout"),
    Fault("fused_lora/kernels/row_norm.py", "tl.minimum(rows - first, rows_per_program)",
          "rows_per_program", "kernels", "rms_norm"),
    Fault("fused_lora/lora_linear.py", "ctx.needs_input_grad[1 : 2 * len(layers) : 2]",
          "ctx.needs_input_grad[2 : 2 * len(layers) + 1 : 2]", "kernels", "lora_functions"),
    Fault("fused_lora/cross_entropy.py", "labelled.sum() > targets.max_labelled",
          "labelled.sum() >= targets.max_labelled", "kernels", "cross_entropy"),
    Fault("fused_lora/kernels/causal_attention.py", "first_key, next, next,",
          "first_key, next, end,", "kernels", "attention_to_documents"),
    Fault("fused_lora/kernels/qkv_rope.py", "row + HEADS * 2 * HALF", "row + KV_HEADS * 2 * HALF",
          "kernels", "qkv_rope"),
    Fault("fused_lora/kernels/sums_over_tokens.py",
          "place += (FIRSTS[i + 1] - FIRSTS[i]) * columns[i]", "place += columns[i]", "kernels",
          "sums_over_tokens"),
    Fault("fused_lora/kernels/swiglu_products_forward.py",
          "end = tl.minimum(start + columns_of_a_split, intermediate)", "end = intermediate",
          "kernels", "swiglu_products_forward"),
    Fault("fused_lora/kernels/fp8_borders.py", "halves(w * (1.0 / factor)[None, :], ROUND)",
          "halves(w * (1.0 / own)[None, :], ROUND)", "kernels", "fp8_borders"),
    Fault("fused_lora/layer/adapter_sums.py", "gradient, scaling)\n", "gradient, 1.0)\n", "kernels",
          "decoder_layer"),
    Fault("fused_lora/step/learning_rates.py", "float(lr) != self.values[index]",
          "self.values[index] is None", "step", "graph"),
    Fault("fused_lora/step/masks.py", "options[MASK] is None and self.had_none.get(layer, True)",
          "options[MASK] is None", "step", "graph_masks"),
    Fault("fused_lora/adopt/foreign/hooks.py", "not collected or key not in collected",
          "not collected", "adopt", "fuse_aside"),
    Fault("fused_lora/adopt/cross_entropy.py", "value is False and name != \"is_causal\"",
          "value is False", "adopt", "fuse_loss"),
    Fault("fused_lora/adopt/documents.py", "is_token[:, :1] > 1", "is_token[:, :1] > 2", "step",
          "graph_masks"),
    Fault("bench/parity.py", "LIMIT * max(error, reference.loss_floor)",
          "LIMIT * (error + reference.loss_floor)", "bench", "parity"),
    Fault("bench/profiler.py", "max(0, kernel.end - max(kernel.start, until))",
          "kernel.end - kernel.start", "bench", "profiled"),
    Fault("report/statistics.py", "max(peaks) / 2**30", "min(peaks) / 2**30", "report", "summary"),
    Fault("models.py", "seq_len >= 512", "seq_len > 512", "bench", "models"),
)
# fmt: on
