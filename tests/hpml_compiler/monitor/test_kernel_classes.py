"""Names that torch's profiler gives to operations and kernels -> the class of work they are."""
from __future__ import annotations

import pytest

from hpml_compiler.monitor.kernel_classes import CLASSES, class_of_event, class_of_kind
from passes.cost_model import COMPUTE_KINDS

# Of operations on CPUs: from profiles with torch 2.13 and gloo. Of CUDA kernels: as profiles in public issues show them
# (pytorch 13412 and 54324, vllm-omni 553, triton 3668, huggingface/blog 1649), and as their libraries name them.
SEEN = {
    "matmul": [
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul", "aten::_scaled_mm",
        "mkl::_mkl_linear", "mkldnn::_linear_pointwise", "extern_kernels.mm",
        "ampere_sgemm_128x64_tn", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(cutlass_80_tensorop::Params)",
        "nvjet_tst_128x152_64x6_1x2_h_bz_TNT", "void gemv2T_kernel_val<int, int, float, float, float, 128, 16, 4, 4>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>", "triton_tem_fused_addmm_relu_3",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", "void reduce_1Block_kernel<float, 128, 7, cublasGemvT>",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    ],
    "attention": [
        "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::scaled_dot_product_attention", "aten::_flash_attention_forward", "aten::_efficient_attention_backward",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 64, 128>>",
        "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 64, 128>>(Flash_bwd_params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64",
    ],
    "convolution": [
        "aten::convolution", "aten::conv2d", "aten::mkldnn_convolution", "aten::convolution_backward",
        "aten::_conv_depthwise2d", "mkldnn::_convolution_pointwise",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1",
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_relu_tile418n_nt",
        "void cudnn::detail::implicit_convolve_sgemm<float, float, int=128, int=6, int=7>(int, int, int, float const *)",
        "void cudnn::detail::wgrad_alg0_engine<float, int=512, int=6>(int)", "void cudnn::detail::dgrad_engine<float, int=128>",
        "volta_scudnn_128x64_relu_small_nn_v1", "ampere_fp16_s16816cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    ],
    "pointwise": [
        "aten::add", "aten::mul_", "aten::native_layer_norm", "aten::sum", "aten::embedding", "aten::copy_", "aten::_softmax",
        "aten::masked_fill", "prims::convert_element_type", "cpp_fused_add_native_layer_norm_3", "graph_0_cpp_fused_gelu_5",
        "triton_poi_fused_add_mul_0", "triton_red_fused_native_layer_norm_2", "triton_per_fused__softmax_4",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "Memcpy DtoD (Device -> Device)",
        "Memset (Device)", "## Call CompiledFxGraph f7wzojni4xedbgxddseu2shfhajctr57fdrvupyxywgv6we6mzlb ##",
    ],
    "collective": [
        "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor", "c10d::allreduce_",
        "c10d::allgather_into_tensor_coalesced_", "c10d::reduce_scatter_tensor_coalesced_", "gloo:all_reduce",
        "nccl:_all_gather_base", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    ],
    "optimizer": ["Optimizer.step#AdamW.step", "Optimizer.step#SGD.step"],
    None: [
        "Torch-Compiled Region: 0/0", "CompiledFunctionBackward", "LocalViewsBackward", "TorchDynamo Cache Lookup",
        "autograd::engine::evaluate_function: CompiledFunctionBackward", "Optimizer.zero_grad#AdamW.zero_grad",
        "AOTDispatcher Runtime Wrapper Prologue", "cudaDeviceSynchronize", "ProfilerStep#3", "hpml graph", "PythonSubclass",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(found, name) for found, names in SEEN.items() for name in names])
def test_class_of_event(expected, name):
    assert class_of_event(name) == expected


def test_every_class_has_an_example_but_overhead_which_is_the_rest():
    assert {*filter(None, SEEN), "overhead"} == set(CLASSES)


def test_every_kind_of_the_plan_has_a_class():
    assert {class_of_kind(kind) for kind in COMPUTE_KINDS} == {"matmul", "attention", "convolution", "pointwise"}
