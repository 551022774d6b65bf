"""Tensors that go to the host and come back by calls."""

from __future__ import annotations

import pytest
import torch
from hybridq.te.pytorch.cpu_offload import OffloadableLayerState

import hybridq.te as te

E4M3 = te.DType.kFloat8E4M3
QUANTIZERS = [
    te.Float8CurrentScalingQuantizer(E4M3),
    te.NVFP4Quantizer(),
    te.IdentityQuantizer(),
    te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    ),
]


def test_every_buffer_comes_back_as_it_was_in_other_memory() -> None:
    tensors = [one(torch.randn(32, 64)) for one in QUANTIZERS] + [torch.randn(5, 7).t()]
    tensors[0].update_usage(rowwise_usage=False)
    state = OffloadableLayerState()
    keys = [state.push_tensor(one) for one in tensors]
    assert [state.pop_tensor(key) is one for key, one in zip(keys, tensors, strict=True)][-1]
    state.start_offload()
    host = state.cpu_tensor_group.tensor_list
    held = list(state.fwd_gpu_tensor_group.tensor_list)
    assert len(host) == len(held) > len(tensors)
    state.release_activation_forward_gpu_memory()
    assert not state.fwd_gpu_tensor_group.tensor_list
    state.start_reload()
    own = {one.data_ptr() for one in (*held, *host)}
    assert own.isdisjoint(one.data_ptr() for one in state.bwd_gpu_tensor_group.tensor_list)
    for key, one in zip(keys, tensors, strict=True):
        back = state.pop_tensor(key)
        assert type(back) is type(one) and back.stride() == one.stride()
        if isinstance(one, te.QuantizedTensor):
            assert back.get_usages() == one.get_usages() and back.quantizer == one.quantizer
            back, one = back.dequantize(), one.dequantize()
        assert torch.equal(back, one)
    state.release_all_memory()
    assert state.state == "not_offloaded" and not state.bwd_gpu_tensor_group.tensor_list


def test_steps_out_of_order_say_so() -> None:
    state = OffloadableLayerState()
    key = state.push_tensor(torch.ones(3))
    with pytest.raises(RuntimeError, match="start_reload: state must be offload_finished, got not"):
        state.start_reload()
    state.start_offload()
    with pytest.raises(RuntimeError, match="push_tensor: state must be not_offloaded"):
        state.push_tensor(torch.ones(3))
    with pytest.raises(RuntimeError, match="not_offloaded or reload_started, got offload_started"):
        state.pop_tensor(key)
    with pytest.raises(NotImplementedError, match="retain_pinned_cpu_buffers"):
        OffloadableLayerState(retain_pinned_cpu_buffers=True)
