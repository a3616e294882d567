"""The kinds of kernels by name and by module, on lists made by hand."""

import re
from pathlib import Path

import pytest

from bench.evidence import kinds_of_kernels
from bench.profiler import Kernel, Op, busy_ns, kernel_ms_by_kind, kind_of_name
from variants import Recipe

MS = 1_000_000  # ns
OURS = kinds_of_kernels(Recipe(fused=("mlp",)))
PLAIN = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
)

# --- names ----------------------------------------------------------------------------------------

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
UNNAMED = "void at::native::(anonymous namespace)::"
NAMES = {  # as the profiler gave them on an H200
    "matmul": [
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned",
        "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int, unsigned int",
        "_attention_forward_kernel",
    ],
    "dequantising": [
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*",
        "_nf4_dequant_kernel",
        "_dequantize_4bit_kernel",
    ],
    "adapter": ["_extend_rows_kernel"],
    "norm": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<f",
        f"{ELEMENTWISE}rsqrt_kernel_cuda(at::TensorIteratorBase&)",
        "_rms_norm_backward_kernel",
    ],
    "activation": [
        f"{ELEMENTWISE}(anonymous namespace)::silu_backward_kernel(at::TensorIteratorBase&)",
        "triton_poi_fused__to_copy_add_mul_rsub_sigmoid_2",
        "_swiglu_backward_kernel",
        "_fg_kernel",
        "_DWf_DW_dfg_kernel",
    ],
    "rope": [
        f"{ELEMENTWISE}cos_kernel_cuda(at::TensorIteratorBase&)",
        "_rope_embedding",
        "_qkv_rope_kernel",
    ],
    "loss": [
        f"{UNNAMED}cunn_SoftMaxForward<4, float, float, float, at::native::(ano",
        f"{UNNAMED}nll_loss_backward_reduce_cuda_kernel_2d<float, long>(float*",
        "_cross_entropy_kernel",
        "_fl_partial_kernel",
    ],
    "optimizer": [
        f"{UNNAMED}multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOpt",
    ],
    "copy": [
        f"{UNNAMED}multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, float, 2>",
        f"{ELEMENTWISE}bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)",
        f"{ELEMENTWISE}FillFunctor<float>, std::array<char*, 1>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Te",
        "Memset (Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "triton_poi_fused__to_copy_t_1",
        "triton_poi_fused__to_copy_addmm__t_9",
    ],
    None: [
        f"{ELEMENTWISE}CUDAFunctor_add<float>, std::array<char*, 3>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long",
        "triton_poi_fused_add_view_9",
        "triton_poi_fused__unsafe_view_add_mul_squeeze_transpose_view_3",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names]
)
def test_what_the_name_of_a_kernel_tells(kind, name):
    assert kind_of_name(name, OURS) == kind


def test_the_names_of_our_own_kernels_tell():
    root = Path(__file__).parents[2]
    sources = [
        path.read_text() for d in ("fused_lora", "fused_mlp") for path in root.glob(f"{d}/**/*.py")
    ]
    names = re.findall(r"@triton.jit.*\ndef (\w+_kernel)\(", "\n".join(sources))
    assert len(names) > 20 and not [name for name in names if kind_of_name(name, OURS) is None]


# --- time -----------------------------------------------------------------------------------------


def kernel(op, ms=1, name=PLAIN, start=0):
    return Kernel(name, start, start + ms * MS, op)


def test_the_time_in_which_anything_ran_counts_overlaps_once():
    one_stream = [Kernel("a", 0, 10, 1), Kernel("b", 20, 30, 2)]
    other_stream = [Kernel("c", 5, 15, 3), Kernel("d", 22, 25, 4), Kernel("e", 30, 31, 5)]
    assert busy_ns(one_stream) == 20
    assert busy_ns(other_stream + one_stream) == 26  # 0 to 15 and 20 to 31
    inside = [Kernel("f", 40, 70, 6), Kernel("g", 45, 50, 7), Kernel("h", 52, 60, 8)]
    assert busy_ns(inside) == 30
    assert busy_ns([]) == 0


def test_times_are_added_up_by_kind():
    kernels = [
        kernel(0, 3, "Memset (Device)"),
        kernel(0, 2, "nvjet_sm90"),
        kernel(0, 1, "nvjet_sm90"),  # at the same time, on another stream
        kernel(0, 5),
    ]
    assert kernel_ms_by_kind([], kernels) == {"matmul": 3.0, "copy": 3.0, "other": 5.0}
    told = [("norm", ("nvjet", "_of_ours"))]  # before what names tell
    assert kernel_ms_by_kind([], kernels, told) == {"norm": 3.0, "copy": 3.0, "other": 5.0}


# --- modules, by hand -----------------------------------------------------------------------------


def op(id, start, end, name="aten::mul", thread=1, sequence=-1, forward_thread=0):
    return Op(name, thread, start, end, id, sequence, forward_thread)


def module(name, id, start, end, thread=1):
    return op(id, start, end, f"module: {name}", thread)


def backward(id, start, end, sequence, forward_thread=1, thread=2):
    name = "autograd::engine::evaluate_function: MulBackward0"
    return op(id, start, end, name, thread, sequence, forward_thread)


def kinds_of_kernels(ops, *ids):
    """Return the kind of a nameless kernel launched by each of these calls."""
    return [next(iter(kernel_ms_by_kind(ops, [kernel(id)]))) for id in ids]


def test_a_nameless_kernel_belongs_to_the_module_that_launched_it():
    wanted = {
        **{"Qwen2RMSNorm": "norm", "Linear": "adapter", "Qwen2MLP": "activation"},
        **{"SiLUActivation": "activation", "Qwen2RotaryEmbedding": "rope"},
        **{"Qwen2Attention": "rope", "Qwen2DecoderLayer": "other", "Embedding": "other"},
        **{"Qwen2ForCausalLM": "loss", "Dropout": "other"},
    }
    for name, kind in wanted.items():
        ops = [module(name, 1, 0, 10), op(2, 3, 5)]
        assert kinds_of_kernels(ops, 2) == [kind], name
        assert kernel_ms_by_kind(ops, [kernel(2, 1, "nvjet_sm90")]) == {"matmul": 1.0}  # by name


def test_the_innermost_module_around_a_call_wins():
    ops = [
        module("Qwen2DecoderLayer", 1, 0, 100),
        op(2, 1, 2),
        module("Qwen2MLP", 3, 10, 50),
        op(4, 12, 14),
        module("Linear", 5, 20, 30),
        op(6, 20, 29, "aten::linear"),
        op(7, 21, 25),  # a call inside of a call
        op(8, 30, 35),  # after the linear layer
        module("Dropout", 9, 40, 45),  # of no kind: it takes the kind of the module around it
        op(10, 41, 42),
        op(11, 60, 61),  # after the MLP
        op(12, 100, 101),  # after the layer
        op(13, 12, 14, thread=5),  # of another thread
    ]
    wanted = {
        **{2: "other", 4: "activation", 6: "adapter", 7: "adapter", 8: "activation"},
        **{10: "activation", 11: "other", 12: "other", 13: "other", 99: "other"},
    }
    assert kinds_of_kernels(ops, *wanted) == list(wanted.values())
    assert kinds_of_kernels(ops[::-1], *wanted) == list(wanted.values())


NORM = [module("Qwen2RMSNorm", 1, 0, 10), op(2, 1, 2, sequence=7)]
BACKWARD = [backward(3, 100, 200, sequence=7), op(4, 101, 105, thread=2)]


@pytest.mark.parametrize(
    ("ops", "kinds"),
    [
        (NORM + BACKWARD, {4: "norm"}),
        # on its forward's own thread
        ([*NORM, backward(3, 100, 110, sequence=7, thread=1), op(4, 101, 105)], {4: "norm"}),
        # in the order of their numbers
        (
            [
                *(*NORM, module("Qwen2MLP", 5, 11, 20), op(6, 12, 14, sequence=8)),
                *(backward(7, 80, 90, sequence=8), op(8, 81, 85, thread=2), *BACKWARD),
                op(9, 110, 119, "MulBackward0", thread=2, sequence=7, forward_thread=1),
                op(10, 112, 113, thread=2),
            ],
            {8: "activation", 4: "norm", 10: "norm"},
        ),
        # another thread's number, and a number without a forward
        ([*NORM, backward(3, 100, 110, 7, forward_thread=4), BACKWARD[1]], {4: "other"}),
        ([*NORM, backward(3, 100, 110, sequence=9), BACKWARD[1]], {4: "other"}),
        # among calls with the same number, the last was recorded
        ([module("Linear", 5, -20, -10), op(6, -15, -14, sequence=7), *NORM, *BACKWARD],
         {4: "norm"}),
        # a forward recomputed inside a backward has its own ranges
        (
            [
                *(*NORM, *BACKWARD, module("Qwen2MLP", 5, 110, 150, thread=2)),
                *(op(6, 120, 130, thread=2, sequence=3), op(7, 160, 170, thread=2)),
            ],
            {6: "activation", 7: "norm"},
        ),
    ],
)  # fmt: skip
def test_a_backward_takes_the_kind_of_its_forward(ops, kinds):
    for in_any_order in (ops, ops[::-1]):
        assert kinds_of_kernels(in_any_order, *kinds) == list(kinds.values())
